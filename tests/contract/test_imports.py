"""What no import may bring, how processes start, and when ranks may wait for each other.

Who may import whom is in pyproject.toml: `[tool.importlinter]`.
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
    python_files,
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


# Of multiprocessing: they start processes by the default method, which may be fork.
OF_DEFAULT_CONTEXT = {
    *("Process", "Pool", "Manager", "Queue", "JoinableQueue", "SimpleQueue"),
    *("Lock", "RLock", "Semaphore", "Condition", "Event", "Barrier", "Value", "Array"),
}


def _forks(tree: ast.AST) -> Iterator[int]:
    """Lines that fork this process, or may do so."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "multiprocessing":
            if OF_DEFAULT_CONTEXT & {alias.name for alias in node.names}:
                yield node.lineno
        if not isinstance(node, ast.Call):
            continue
        owner, _, name = ast.unparse(node.func).rpartition(".")
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        values = [*node.args, *given.values()]
        texts = {value.value for value in values if isinstance(value, ast.Constant)}
        has_workers = "num_workers" in given and ast.unparse(given["num_workers"]) != "0"
        if (
            (owner in ("os", "pty") and name in ("fork", "forkpty"))
            or (name in ("get_context", "set_start_method") and (not values or "fork" in texts))
            or (owner in ("multiprocessing", "mp") and name in OF_DEFAULT_CONTEXT)
            or (name == "ProcessPoolExecutor" and len(node.args) < 2 and "mp_context" not in given)
            or (has_workers and name.endswith("Loader") and "multiprocessing_context" not in given)
            or ("multiprocessing_context" in given and "fork" in texts)
            or "preexec_fn" in given
        ):
            yield node.lineno


def test_no_process_forks() -> None:
    """The child would wait for ever for a lock that another thread held (`fork_server`).

    The server is forked by a process that has looked that it has one thread. Benchmarks that draw
    images or copy files have one, too.
    """
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in python_files()
        if path.relative_to(ROOT).parts[0] not in ("tests", "benchmarks")
        and path != ROOT / "vitscale/distributed/fork_server.py"
        for line in _forks(parsed(path))
    ]
    assert not found, "use vitscale.distributed.fork_server.worker_context"


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
