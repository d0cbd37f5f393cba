"""Print what a study trains: cells, sizes, costs and states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from launch.comparison.text import ABSENT, Table, plain_text
from launch.studies.grid import Grid
from launch.studies.states import FINISHED, Progress, TrainingState


def overview(grid: Grid, states: Mapping[str, TrainingState]) -> str:
    """All trainings with what each costs, the totals, and the changed settings."""
    rows = []
    for name, training in grid.trainings.items():
        rows.append(
            (
                name,
                states[name].text,
                _count(training.images),
                _count(training.steps),
                _count(training.parameters),
                _flops(training.flops),
            )
        )
    num_cells = len(grid.cells) + len(grid.trials)
    title = (
        f"Study {grid.study.name}: {num_cells} cells, {len(grid.trainings)} trainings "
        f"({_states_text(states)})"
    )
    header = ("training", "state", "images", "steps", "parameters", "FLOPs")
    parts = [plain_text(Table(title=title, header=header, rows=tuple(rows)))]
    left = [t for name, t in grid.trainings.items() if states[name].progress not in FINISHED]
    known = [training.flops for training in left if training.flops is not None]
    unknown = f", {len(left) - len(known)} of unknown cost" if len(known) < len(left) else ""
    parts.append(f"to train: {len(left)} trainings, {_flops(sum(known))} FLOPs{unknown}\n")
    for name, state in states.items():
        if state.progress is Progress.CHANGED:
            parts.append("\n".join([f"{name} was trained with other settings:", *state.changes]))
    return "\n".join(parts)


def _states_text(states: Mapping[str, TrainingState]) -> str:
    counts = Counter(state.progress for state in states.values())
    return ", ".join(f"{counts[p]} {p.value}" for p in Progress if counts[p])


def _count(number: int | None) -> str:
    return ABSENT if number is None else f"{number:,}"


def _flops(number: int | None) -> str:
    return ABSENT if number is None else f"{number:.3g}"
