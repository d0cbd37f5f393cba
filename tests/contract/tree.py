"""The tree as the contract tests see it: files, modules, imports. Nothing of it is imported."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("vitscale", "data_prep", "pretrain", "finetune", "launch")


@cache
def module_files() -> dict[str, Path]:
    """Module name -> file, for everything that is installed."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = path
    assert len(found) > 20, "the tree was not found"
    return found


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


@cache
def imports_of(module: str) -> frozenset[str]:
    """Absolute names that a module imports; `from a import b` is a.b when that is a module."""
    found = set()
    for node in ast.walk(parsed(module_files()[module])):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, (
                f"{module}:{node.lineno}: relative import"
            )
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in module_files() else node.module)
    return frozenset(found)


@cache
def scripts() -> frozenset[str]:
    """Modules that a person runs: those with `if __name__ == "__main__"`."""
    return frozenset(
        module
        for module, path in module_files().items()
        if any(
            isinstance(node, ast.If) and "__name__" in ast.dump(node.test)
            for node in parsed(path).body
        )
    )
