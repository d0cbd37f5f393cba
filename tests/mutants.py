"""Change one place of the product at a time and see whether its tests notice.

    make mutants                                   # 20 random places of the product
    make mutants ARGS="--num 200 --seed 3"
    make mutants ARGS="--since HEAD~5"             # of the files changed since
    make mutants ARGS="vitscale/data launch/jobs/queue.py"

Owns: the kinds of change, which tests belong to a module, and the report.
Leaves out: slow tests, and judging: a survivor may be an equivalent program.

Works in a copy of the tree. The tests of a module are those of the same name, those that import it
and those of its folder. Modules without tests, or with tests that fail before any change, are
reported and left out.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("vitscale", "pretrain", "finetune", "data_prep", "launch")
# Of one module; the closest by name come first.
MOST_TEST_FILES = 12
LIMIT_S = 300.0
SWAPPED: dict[type, Any] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq},
    **{ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot},
    **{ast.IsNot: ast.Is, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div},
    **{ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.And: ast.Or},
    **{ast.Or: ast.And},
}


class Mutant(NamedTuple):
    """One change: the characters from `start` to `end` of a file become `new`."""

    path: str
    line: int
    start: int
    end: int
    old: str
    new: str


def mutants_of(path: str, text: str) -> list[Mutant]:
    """Every change of a module that this tool knows."""
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    data, found = text.encode(), []
    tree = ast.parse(text)
    for parent in ast.walk(tree):
        for child in ast.iter_child_nodes(parent):
            child.parent = parent  # type: ignore[attr-defined]  # read by `_changes`
    for node in ast.walk(tree):
        for target, new in _changes(node):
            start = starts[target.lineno - 1] + target.col_offset
            end = starts[target.end_lineno - 1] + target.end_col_offset
            old = data[start:end].decode()
            found.append(Mutant(path, target.lineno, start, end, old, new))
    return found


def _changes(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
        ops = [SWAPPED[type(node.ops[0])](), *node.ops[1:]]
        yield node, f"({ast.unparse(ast.Compare(node.left, ops, node.comparators))})"
    elif isinstance(node, ast.BinOp) and type(node.op) in SWAPPED and not _is_text(node):
        yield node, f"({ast.unparse(ast.BinOp(node.left, SWAPPED[type(node.op)](), node.right))})"
    elif isinstance(node, ast.BoolOp):
        yield node, f"({ast.unparse(ast.BoolOp(SWAPPED[type(node.op)](), node.values))})"
        yield node, f"({ast.unparse(node.values[0])})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant) and not _is_declaration(node):
        if isinstance(node.value, bool):
            yield node, str(not node.value)
        elif isinstance(node.value, int):
            yield node, str(node.value + 1)
        elif isinstance(node.value, float):
            yield node, repr(node.value * 1.5 if node.value else 1.0)
    elif isinstance(node, ast.If | ast.IfExp) and not _is_type_checking(node.test):
        yield node.test, f"(not ({ast.unparse(node.test)}))"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield node, "pass"
    elif isinstance(node, ast.Return) and node.value is not None:
        if not (isinstance(node.value, ast.Constant) and node.value.value is None):
            yield node, "return None"


def _is_text(node: ast.BinOp) -> bool:
    sides = (node.left, node.right)
    return any(isinstance(s, ast.JoinedStr | ast.Constant) and not _number(s) for s in sides)


def _number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def _is_declaration(node: ast.AST) -> bool:
    """Whether it is part of a type, or of a decorator such as dataclass(frozen=True)."""
    while (parent := getattr(node, "parent", None)) is not None:
        if isinstance(parent, ast.AnnAssign) and node is parent.annotation:
            return True
        if isinstance(parent, ast.arg) or getattr(parent, "returns", None) is node:
            return True
        if node in getattr(parent, "decorator_list", ()):
            return True
        node = parent
    return False


def _is_type_checking(test: ast.expr) -> bool:
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


@cache
def _tests() -> tuple[tuple[str, str], ...]:
    """(path, text) of every test file."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return tuple((str(path.relative_to(ROOT)), path.read_text()) for path in paths)


def tests_of(path: str) -> list[str]:
    """The test files of a module, the closest first."""
    module = path.removesuffix(".py").replace("/", ".")
    package, _, name = module.rpartition(".")
    own = f"tests/unit/{path.rpartition('/')[0]}/test_{name}.py"
    imports = (f"from {module} import", f"import {module}\n", f"from {package} import {name}\n")
    found = [p for p, text in _tests() if p == own or any(each in text for each in imports)]
    near = f"tests/unit/{path.rpartition('/')[0]}/"
    found += [p for p, _ in _tests() if p.startswith(near) and p not in found]
    found = [p for p in found if not p.startswith("tests/contract/")]
    key = {p: (p != own, not p.startswith(near), "integration" in p, p) for p in found}
    return sorted(found, key=key.__getitem__)[:MOST_TEST_FILES]


def passes(tree: Path, tests: Sequence[str]) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
    command += ["-m", "not slow and not exhaustive", *tests]
    try:
        env = os.environ | {"PYTHONPATH": str(tree)}
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def copied_tree(folder: Path) -> Path:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    # Built extensions, which git ignores.
    built = [str(p.relative_to(ROOT)) for part in PRODUCT for p in (ROOT / part).rglob("*.so")]
    for name in (*names.splitlines(), *built):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def modules(given: Sequence[str], since: str | None) -> list[str]:
    if since is not None:
        command = ["git", "diff", "--name-only", since]
        given = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.splitlines()
    chosen = [ROOT / each for each in given or PRODUCT]
    paths = [p for each in chosen for p in (each.rglob("*.py") if each.is_dir() else [each])]
    relative = {str(p.relative_to(ROOT)) for p in paths if p.is_file()}
    return sorted(p for p in relative if p.split("/")[0] in PRODUCT and p.endswith(".py"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("modules", nargs="*", help="files or folders; default: the product")
    parser.add_argument("--since", help="files changed since this commit")
    parser.add_argument("--num", type=int, default=20, help="random changes (20)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    paths = modules(options.modules, options.since)
    found = [each for path in paths for each in mutants_of(path, (ROOT / path).read_text())]
    chosen = random.Random(options.seed).sample(found, min(options.num, len(found)))
    survivors, caught = [], 0
    with tempfile.TemporaryDirectory() as folder:
        tree = copied_tree(Path(folder))
        sound = cache(lambda path: bool(tests_of(path)) and passes(tree, tests_of(path)))
        for mutant in sorted(chosen):
            what = f"{mutant.path}:{mutant.line}: {mutant.old!r} -> {mutant.new!r}"
            if not sound(mutant.path):
                print(f"left out  {what}: no tests that pass", flush=True)
                continue
            file, start = tree / mutant.path, time.monotonic()
            data = file.read_bytes()
            file.write_bytes(data[: mutant.start] + mutant.new.encode() + data[mutant.end :])
            is_caught = not passes(tree, tests_of(mutant.path))
            file.write_bytes(data)
            caught += is_caught
            survivors += [] if is_caught else [what]
            took = f"{time.monotonic() - start:.0f} s"
            print(f"{'caught  ' if is_caught else 'SURVIVED'}  {what} ({took})", flush=True)
    print(
        f"{caught} of {caught + len(survivors)} caught; {len(found)} places in {len(paths)} files"
    )


if __name__ == "__main__":
    main()
