"""How long files, functions and lines may be."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.contract.tree import ROOT, parsed, python_files

MAX_FILE_LINES, MAX_TEST_FILE_LINES = 400, 450
MAX_FUNCTION_LINES = 60
MAX_DOCS_LINE = 100
MAX_TEST_NAME = 60


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _in_tests(path: Path) -> bool:
    return path.is_relative_to(ROOT / "tests")


def test_files_are_short() -> None:
    long = {}
    for path in python_files():
        limit = MAX_TEST_FILE_LINES if _in_tests(path) else MAX_FILE_LINES
        if (lines := len(path.read_text().splitlines())) > limit:
            long[_name(path)] = lines
    assert not long


def test_functions_are_short() -> None:
    """Docstrings are counted."""
    long = {}
    for path in python_files():
        for node in ast.walk(parsed(path)):
            if _in_tests(path) or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                long[f"{_name(path)}: {node.name}"] = lines
    assert not long


def test_names_of_tests_are_short() -> None:
    long = [
        f"{_name(path)}: {node.name}"
        for path in python_files()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("test_")
        and len(node.name) > MAX_TEST_NAME
    ]
    assert not long


def test_lines_of_the_docs_are_short() -> None:
    """Tables and links may be longer: they cannot be wrapped."""
    pages = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
    long = {
        _name(page): count
        for page in pages
        if (count := sum(map(_is_too_long, page.read_text().splitlines())))
    }
    assert not long


def _is_too_long(line: str) -> bool:
    return len(line) > MAX_DOCS_LINE and not line.startswith("|") and " " in line.strip()
