"""The tree as the contract tests see it: files, modules, imports. Nothing of it is imported."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("vitscale", "data_prep", "pretrain", "finetune", "launch")


@cache
def module_files() -> dict[str, Path]:
    """Module name -> file, for everything that is installed."""
    files = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            files[".".join(parts).removesuffix(".__init__")] = path

    # Tests that look for something wrong in no file would all pass.
    assert len(files) > 20, "the tree was not found"
    return files


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


@cache
def imports_of(module: str) -> frozenset[str]:
    """Absolute names that a module imports; `from a import b` is a.b when that is a module."""
    names = set()
    # Imports within functions count, too: they run at some time.
    for node in ast.walk(parsed(module_files()[module])):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            place = f"{module}:{node.lineno}: relative import"
            assert node.level == 0, place
            assert node.module, place
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                names.add(inner if inner in module_files() else node.module)
    return frozenset(names)


@cache
def scripts() -> frozenset[str]:
    """Modules that a person runs: those with `if __name__ == "__main__"`."""
    modules = set()
    for module, path in module_files().items():
        for node in parsed(path).body:
            # By the parsed test: the words may also be in a docstring.
            if isinstance(node, ast.If) and "__name__" in ast.dump(node.test):
                modules.add(module)
    return frozenset(modules)
