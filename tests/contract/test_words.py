"""Code, docs and names of tests use the field's terms instead of private words."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.contract.tree import PACKAGES, ROOT, parsed, python_files

# What to write instead of each.
INSTEAD = {
    r"go(es|ing)? on where": "resumes",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\bforeign\b": "external",
    r"\bfates?\b": "assignment",
    r"\bjudg(e|es|ed|ing)\b": "validate",
    r"who is missing": "hung ranks",
    r"lies (behind|beside)": "is",
    r"\bhouse rule|rules of the house": "rule",
    r"stands on": "uses",
}


def _texts() -> dict[str, str]:
    """Name -> text of the product, the benchmarks and the docs; of tests the names."""
    found = {}
    for path in python_files():
        name = str(path.relative_to(ROOT))
        if name.split("/")[0] in (*PACKAGES, "benchmarks"):
            found[name] = path.read_text()
        elif path.is_relative_to(ROOT / "tests"):
            found[name] = "\n".join(_test_names(path))
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        found[str(page.relative_to(ROOT))] = page.read_text()
    return found


def _test_names(path: Path) -> list[str]:
    return [
        node.name.replace("_", " ")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


def test_no_private_words() -> None:
    texts = _texts()
    found = [
        f"{name}: {match.group()!r}; write {instead!r}"
        for words, instead in INSTEAD.items()
        for name, text in texts.items()
        for match in re.finditer(words, text, re.IGNORECASE)
    ]
    assert not found
