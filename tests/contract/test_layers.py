"""Who may import whom. A new package needs a line in these tables."""

from __future__ import annotations

import sys
from collections import defaultdict
from importlib.metadata import packages_distributions

from tests.contract.tree import (
    PACKAGES,
    ROOT,
    STAGES,
    module_files,
    own_imports_of,
    parsed,
    scripts,
)

SCRIPT_LAYER = 4
STAGE_LAYER = 3
LAYERS = {
    # 0 ground
    "vitscale.config": 0,
    "vitscale.distributed": 0,
    # 1 parts
    "vitscale.checkpoint": 1,
    "vitscale.data": 1,
    "vitscale.engine": 1,
    "vitscale.images": 1,
    "vitscale.models": 1,
    "vitscale.optim": 1,
    "vitscale.tracking": 1,
    # 2 composition
    "vitscale.evaluation": 2,
    "vitscale.runs": 2,
    "vitscale.training": 2,
    # 3 stage parts
    **dict.fromkeys(STAGES, STAGE_LAYER),
}
# Packages of one layer do not import each other. These pairs, (importer, imported), are the
# exceptions.
NEIGHBOURS = {
    ("vitscale.distributed", "vitscale.config"),  # errors
    ("vitscale.data", "vitscale.images"),
    ("vitscale.engine", "vitscale.checkpoint"),  # names of tensor slices
    ("vitscale.engine", "vitscale.optim"),
    ("vitscale.runs", "vitscale.evaluation"),  # settings of evaluations
    ("vitscale.training", "vitscale.evaluation"),
    ("vitscale.training", "vitscale.runs"),
}
# What launch/ may import of the stages: their run types.
RUN_TYPES = {
    "finetune.run",
    "finetune.settings",
    "pretrain.run",
}


def package_of(module: str) -> str:
    """`vitscale.models.vit` -> `vitscale.models`; a stage is one package here."""
    parts = module.split(".")
    return parts[0] if parts[0] in STAGES else ".".join(parts[:2])


def layer_of(module: str) -> int:
    return SCRIPT_LAYER if module in scripts() else LAYERS[package_of(module)]


def test_every_module_has_a_layer() -> None:
    packages = {package_of(module) for module in module_files() if module != "vitscale"}
    assert packages == set(LAYERS)


def test_package_files_are_empty() -> None:
    """But for one, which sets the environment before anything is imported."""
    filled = [m for m, p in module_files().items() if p.name == "__init__.py" and parsed(p).body]
    assert filled == ["vitscale"] and not own_imports_of("vitscale")


def test_imports_go_downwards() -> None:
    wrong = []
    for module in sorted(module_files()):
        for imported in sorted(own_imports_of(module)):
            pair = package_of(module), package_of(imported)
            if pair[0] == pair[1]:
                continue
            if imported in RUN_TYPES and pair[0] == "launch":
                continue
            if layer_of(imported) > layer_of(module):
                wrong.append(f"{module}: {imported} is in a higher layer")
            elif layer_of(imported) == layer_of(module) and pair not in NEIGHBOURS:
                wrong.append(f"{module}: {imported} is in the same layer; see NEIGHBOURS")
    assert not wrong


def test_nobody_imports_a_script() -> None:
    assert not {
        m: own_imports_of(m) & scripts() for m in module_files() if own_imports_of(m) & scripts()
    }


def test_stages_do_not_import_each_other() -> None:
    wrong = [
        f"{module}: {imported}"
        for module in module_files()
        for imported in own_imports_of(module)
        if not (module.startswith("launch.") and imported in RUN_TYPES)
        if (a := module.split(".")[0]) in STAGES
        and (b := imported.split(".")[0]) in STAGES
        and a != b
    ]
    assert not wrong


def _cycle(graph: dict[str, set[str]]) -> list[str]:
    """One circle of a graph, or nothing."""
    done: set[str] = set()

    def visit(node: str, chain: list[str]) -> list[str]:
        if node in chain:
            return [*chain[chain.index(node) :], node]
        if node in done:
            return []
        for following in sorted(graph.get(node, ())):
            found = visit(following, [*chain, node])
            if found:
                return found
        done.add(node)
        return []

    for start in sorted(graph):
        found = visit(start, [])
        if found:
            return found
    return []


def test_modules_import_without_circles() -> None:
    graph = {m: own_imports_of(m) & set(module_files()) for m in module_files()}
    assert not _cycle({m: set(found) for m, found in graph.items()})


def test_packages_import_without_circles() -> None:
    """Folders too: two packages that need each other are one."""
    graph: defaultdict[str, set[str]] = defaultdict(set)
    for module in module_files():
        if module in scripts():
            continue
        folder = module.rpartition(".")[0]
        for imported in own_imports_of(module):
            other = imported.rpartition(".")[0]
            if folder != other:
                graph[folder].add(other)
    assert not _cycle(graph)


def test_neighbours_are_still_needed() -> None:
    used = {(package_of(m), package_of(i)) for m in module_files() for i in own_imports_of(m)}
    assert used >= NEIGHBOURS, "remove these rows: " + str(NEIGHBOURS - used)


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
