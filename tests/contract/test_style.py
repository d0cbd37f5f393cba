"""Rules that a formatter does not check."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

from tests.contract.tree import ROOT, parsed, python_files

# "# type: ignore[code]  # why", and the same for noqa.
REASONLESS = re.compile(r"#\s*(type:\s*ignore|noqa)(?!(\[[\w, -]+\]|:\s*[A-Z0-9, ]+)\s+#\s*\w)")
NEVER = {"skipif", "xfail", "importorskip", "SkipTest", "skipTest"}
REQUIRED_MODE = "VITSCALE_REQUIRE_SLURM"


def _at(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_silenced_checks_have_a_reason() -> None:
    silenced = [
        _at(path, number)
        for path in python_files()
        if path != Path(__file__).resolve()
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if REASONLESS.search(line)
    ]
    assert not silenced, 'write "# type: ignore[code]  # why"'


def test_tests_are_never_skipped_silently() -> None:
    """A test may only skip at run time, by `pytest.skip` with a reason, which `-ra` then prints."""
    wrong = []
    for path in python_files():
        if not path.is_relative_to(ROOT / "tests"):
            continue
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Attribute) and (
                node.attr in NEVER or ast.unparse(node) == "pytest.mark.skip"
            ):
                wrong.append(f"{_at(path, node.lineno)}: {node.attr}")
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.skip":
                if not node.args or ast.unparse(node.args[0]) in ("''", '""'):
                    wrong.append(f"{_at(path, node.lineno)}: skip without a reason")
    assert not wrong


def test_skips_are_listed_with_their_reasons() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]
    assert "-ra" in settings["ini_options"]["addopts"]


def test_slurm_tests_can_be_required() -> None:
    skipping = [
        path
        for path in sorted((ROOT / "tests/integration/slurm").rglob("*.py"))
        if "pytest.skip(" in path.read_text()
    ]
    assert not [path.name for path in skipping if REQUIRED_MODE not in path.read_text()]


def test_no_exception_is_swallowed() -> None:
    """No bare `except`, and no `except Exception: pass`."""
    swallowed = [
        _at(path, node.lineno)
        for path in python_files()
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
    assert not swallowed
