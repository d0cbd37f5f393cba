"""Rules that a formatter does not check."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from tests.contract.tree import ROOT, parsed, python_files

MAX_LINES = 450
FILES = python_files()
# "# type: ignore[code]  # why", and the same for noqa.
REASONLESS = re.compile(r"#\s*(type:\s*ignore|noqa)(?!(\[[\w, -]+\]|:\s*[A-Z0-9, ]+)\s+#\s*\w)")
NEVER = {"skipif", "xfail", "importorskip", "SkipTest", "skipTest"}
REQUIRED_MODE = "VITSCALE_REQUIRE_SLURM"


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_files_stay_readable(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("path", [p for p in FILES if p != Path(__file__).resolve()], ids=_name)
def test_silenced_checks_have_a_reason(path: Path) -> None:
    silenced = [line for line in path.read_text().splitlines() if REASONLESS.search(line)]
    assert not silenced, 'write "# type: ignore[code]  # why"'


@pytest.mark.parametrize("path", [p for p in FILES if p.is_relative_to(ROOT / "tests")], ids=_name)
def test_tests_are_never_skipped_silently(path: Path) -> None:
    """A test may only skip at run time, by `pytest.skip` with a reason, which `-ra` then prints."""
    wrong = [
        f"line {node.lineno}: {node.attr}"
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute)
        and (node.attr in NEVER or ast.unparse(node) == "pytest.mark.skip")
    ]
    wrong += [
        f"line {node.lineno}: skip without a reason"
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "pytest.skip"
        and not (node.args and ast.unparse(node.args[0]) not in ("''", '""'))
    ]
    assert not wrong


def test_skips_are_listed_with_their_reasons() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]
    assert "-ra" in settings["ini_options"]["addopts"]


def test_slurm_tests_can_be_required() -> None:
    folder = ROOT / "tests/integration/slurm"
    skipping = [p for p in sorted(folder.rglob("*.py")) if "pytest.skip(" in p.read_text()]
    assert not [_name(p) for p in skipping if REQUIRED_MODE not in p.read_text()]


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_no_silent_except(path: Path) -> None:
    silent = [
        node.lineno
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ExceptHandler)
        and (
            node.type is None
            or (
                ast.unparse(node.type) in ("Exception", "BaseException")
                and all(isinstance(statement, ast.Pass) for statement in node.body)
            )
        )
    ]
    assert not silent
