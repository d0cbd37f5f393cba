"""What no import may bring, and when ranks may wait for each other.

Who may import whom is in pyproject.toml: `[tool.importlinter]`; what would fork: `[tool.ruff]`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions

from tests.contract.tree import (
    PACKAGES,
    ROOT,
    STAGES,
    imports_of,
    module_files,
    parsed,
    scripts,
    top_level_imports_of,
)

# Entries of registries, whose settings need no torch, and checkpoint folders, which are listed
# without it; their methods need it. Of these only imports at module level count.
LAZY = (
    "finetune.objectives",
    "pretrain.objectives.",
    "vitscale.evaluation.",
    "vitscale.training.",
)
LAZY += ("vitscale.checkpoint.folders",)
TORCHLESS_FOLDERS = ("launch.", "data_prep.", "vitscale.config.", "vitscale.runs.")


def test_settings_and_launching_never_import_torch() -> None:
    """Followed through all own imports, since a login node may have no torch at all."""
    reached = {}
    for start in module_files():
        if not start.startswith(TORCHLESS_FOLDERS) and not start.endswith(".settings"):
            continue
        stack, seen = [start], set()
        while stack:
            module = stack.pop()
            if module in seen:
                continue
            seen.add(module)
            lazy = module.startswith(LAZY)
            names = top_level_imports_of(module) if lazy else imports_of(module)
            if any(name.split(".")[0] in ("torch", "torchvision", "timm") for name in names):
                reached[start] = module
            stack += [name for name in names if name in module_files()]
    assert not reached


def test_package_files_are_empty() -> None:
    """But for one, which sets the environment before anything is imported."""
    filled = [m for m, p in module_files().items() if p.name == "__init__.py" and parsed(p).body]
    assert filled == ["vitscale"] and not imports_of("vitscale") - {"os"}


def test_nobody_imports_a_script() -> None:
    assert not {m: found for m in module_files() if (found := imports_of(m) & scripts())}


def test_no_file_beside_a_script_shadows_a_module() -> None:
    """`python launch/x.py` puts launch/ first on the path: launch/queue.py would hide `queue`."""
    installed = {
        name for name, owners in packages_distributions().items() if owners != ["vitscale"]
    }
    # evaluate, datasets: dependencies of dependencies, not installed everywhere.
    taken = sys.stdlib_module_names | installed | set(PACKAGES) | {"evaluate", "datasets"}
    # Deeper ones run as `python -m`, which puts no folder first.
    folders = {module_files()[s].parent for s in scripts() if s.count(".") == 1}
    assert {folder.name for folder in folders} == set(STAGES)
    names = [
        path for folder in folders for path in folder.iterdir() if not path.name.startswith("__")
    ]
    assert not [str(path.relative_to(ROOT)) for path in names if path.stem in taken]


# Names of torch's collectives, and of the project's functions that are themselves collective.
COLLECTIVES = {
    *("all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "barrier"),
    *("broadcast_object_list", "gather_object", "scatter_object_list", "reduce_scatter_tensor"),
    *("monitored_barrier", "destroy_process_group"),
}
# At a planned end; an error passes by.
PLANNED = {"vitscale/distributed/world.py: process_group"}


def test_no_collective_runs_while_an_error_unwinds() -> None:
    """The other ranks may be in another collective: both would wait.

    Clean-up is what `finally`, `__exit__`, `__del__` and handlers of any error run, and the
    functions of a name that only one function has.
    """
    functions: dict[str, list[ast.AST]] = {}
    for path in module_files().values():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef):
                functions.setdefault(node.name, []).append(node)
    collective = set(COLLECTIVES)
    while True:
        more = {
            name
            for name, nodes in functions.items()
            if len(nodes) == 1 and name not in collective and _called(nodes[0]) & collective
        }
        if not more:
            break
        collective |= more
    assert len(collective) > len(COLLECTIVES)
    found = {}
    for path in module_files().values():
        for function, node in _clean_ups(parsed(path)):
            place = f"{path.relative_to(ROOT)}: {function}"
            if place not in PLANNED and (names := _called(node) & collective):
                found[place] = sorted(names)
    assert not found


def _called(node: ast.AST) -> set[str]:
    """Names of the functions that are called in it, nested functions included."""
    names = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Call):
            if isinstance(each.func, ast.Attribute):
                names.add(each.func.attr)
            elif isinstance(each.func, ast.Name):
                names.add(each.func.id)
    return names


def _clean_ups(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        if function.name in ("__exit__", "__del__"):
            yield function.name, function
        for node in ast.walk(function):
            if isinstance(node, ast.Try):
                for handler in node.handlers:
                    if handler.type is None or "BaseException" in ast.unparse(handler.type):
                        yield from ((function.name, each) for each in handler.body)
                yield from ((function.name, each) for each in node.finalbody)
