"""Who may import whom. A new module needs a line in these tables, and a thought about its place."""

from __future__ import annotations

import pytest

from tests.contract.tree import STAGES, module_files, own_imports_of, parsed, scripts

FLOORS = {
    # 0 ground
    "vitscale.errors": 0,
    "vitscale.atomic_files": 0,
    "vitscale.config": 0,
    "vitscale.distributed": 0,
    "vitscale.heartbeat": 0,
    # 1 parts
    "vitscale.data": 1,
    "vitscale.models": 1,
    "vitscale.optim": 1,
    "vitscale.schedules": 1,
    "vitscale.losses": 1,
    "vitscale.engine": 1,
    "vitscale.checkpoint": 1,
    "vitscale.tracking": 1,
    "vitscale.speed": 1,
    # 2 composition
    "vitscale.runs": 2,
    "vitscale.evaluation": 2,
    "vitscale.training": 2,
    "vitscale.training_loop": 2,
    "vitscale.resuming": 2,
    "vitscale.health": 2,
    # 3 stage parts
    **dict.fromkeys(STAGES, 3),
}
SCRIPT_FLOOR = 4
SCRIPTS = {
    "data_prep.index_shards",
    "data_prep.make_digits",
    "data_prep.make_shards",
    "data_prep.verify_shards",
    "pretrain.main",
    "finetune.main",
    "launch.compare",
    "launch.demo",
    "launch.flops",
    "launch.local",
    "launch.slurm",
}
# Parts of one floor stand side by side. These pairs, (importer, imported), are the exceptions.
NEIGHBOURS = {
    ("vitscale.config", "vitscale.errors"),
    ("vitscale.distributed", "vitscale.errors"),
    ("vitscale.heartbeat", "vitscale.distributed"),
    ("vitscale.engine", "vitscale.optim"),  # the engine steps the optimiser it is given
    ("vitscale.engine", "vitscale.checkpoint"),  # the engine names its slices
    ("vitscale.training", "vitscale.runs"),
    ("vitscale.training", "vitscale.health"),
    ("vitscale.training", "vitscale.resuming"),
    ("vitscale.training", "vitscale.training_loop"),
    ("vitscale.training_loop", "vitscale.evaluation"),  # both loops evaluate on the way
    ("vitscale.training_loop", "vitscale.runs"),
    ("vitscale.training_loop", "vitscale.health"),
    ("vitscale.resuming", "vitscale.health"),
    ("vitscale.resuming", "vitscale.runs"),
    ("vitscale.health", "vitscale.runs"),
}
MODULES = sorted(module_files())


def part_of(module: str) -> str | None:
    """The row of FLOORS that a module belongs to."""
    while module and module not in FLOORS:
        module = module.rpartition(".")[0]
    return module or None


def floor_of(module: str) -> int:
    part = part_of(module)
    assert part is not None, f"{module} has no floor; give it one in FLOORS"
    return SCRIPT_FLOOR if module in SCRIPTS else FLOORS[part]


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_a_floor(module: str) -> None:
    if module != "vitscale":
        floor_of(module)


def test_scripts_are_exactly_the_known_ones() -> None:
    assert scripts() == SCRIPTS & set(MODULES)


def test_package_files_are_empty() -> None:
    filled = [m for m, p in module_files().items() if p.name == "__init__.py" and parsed(p).body]
    assert not filled


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_downwards(module: str) -> None:
    part, wrong = part_of(module), []
    for imported in sorted(own_imports_of(module)):
        other = part_of(imported)
        if other == part and imported not in SCRIPTS:
            continue
        if floor_of(imported) > floor_of(module):
            wrong.append(f"{imported} stands on a higher floor")
        elif floor_of(imported) == floor_of(module) and (part, other) not in NEIGHBOURS:
            wrong.append(f"{imported} is a neighbour that NEIGHBOURS does not allow")
    assert not wrong, f"{module}: {wrong}"


@pytest.mark.parametrize("module", MODULES)
def test_nobody_imports_a_script(module: str) -> None:
    assert not own_imports_of(module) & SCRIPTS


@pytest.mark.parametrize("module", [m for m in MODULES if m.split(".")[0] in STAGES])
def test_stages_do_not_import_each_other(module: str) -> None:
    others = {stage for stage in STAGES if stage != module.split(".")[0]}
    assert not [name for name in own_imports_of(module) if name.split(".")[0] in others]


def test_no_import_cycles() -> None:
    done: set[str] = set()

    def visit(module: str, chain: tuple[str, ...]) -> None:
        assert module not in chain, " -> ".join((*chain, module))
        if module in done:
            return
        for imported in own_imports_of(module):
            if imported in module_files():
                visit(imported, (*chain, module))
        done.add(module)

    for module in MODULES:
        visit(module, ())


def test_neighbours_are_still_needed() -> None:
    used = {(part_of(m), part_of(i)) for m in MODULES for i in own_imports_of(m)}
    assert used >= NEIGHBOURS, "remove these rows: " + str(NEIGHBOURS - used)
