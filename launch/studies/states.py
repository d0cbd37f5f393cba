"""Find and list which trainings of a study are done, resumable, missing or changed.

Leaves out: verifying the tensors of a checkpoint, which resuming does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from launch.comparison.text import ABSENT, Table, plain_text
from launch.studies.grid import RUN_TYPES, Grid, StudyTraining
from vitscale.checkpoint.folders import looks_whole, step_folders, step_of
from vitscale.config.errors import UserError
from vitscale.config.loader import load_run_file, run_leaves, yaml_flow
from vitscale.config.section import Run

# Changing these changes where and how fast a run trains, not its result.
WITHOUT_EFFECT = (
    *("name", "output", "launch", "tracking", "checkpoint"),
    *("data.num_workers", "data.remote", "data.planned_num_samples"),
    *("engine.num_threads", "engine.timeout_min"),
    *("engine.max_micro_batch", "engine.profile_steps"),
)
MAX_CHANGES = 5


class Completion(Enum):
    """How far a training of a study, or another run of a chain, is done."""

    MISSING = "missing"
    RESUMABLE = "resumable"
    DONE = "done"
    CHANGED = "changed"
    """Trained, wholly or in part, with other settings than the study has now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingState:
    progress: Completion
    step: int = 0
    """Step of the newest checkpoint."""
    changes: tuple[str, ...] = ()
    """Settings that differ from those of the run folder."""

    @property
    def text(self) -> str:
        is_partial = self.progress is Completion.RESUMABLE
        return f"{self.progress.value} (step {self.step:,})" if is_partial else self.progress.value


def states_of(grid: Grid) -> dict[str, TrainingState]:
    """The state of every training, by name."""
    states: dict[str, TrainingState] = {}
    for name, training in grid.trainings.items():
        state = state_of(training)
        source = states.get(training.needs) if training.needs is not None else None
        if source is not None and state.step and source.progress is not Completion.DONE:
            what = f"its pre-training {training.needs} is {source.progress.value}"
            state = TrainingState(progress=Completion.CHANGED, step=state.step, changes=(what,))
        states[name] = state
    return states


def state_of(training: StudyTraining) -> TrainingState:
    """The state by its own folder."""
    whole = (path for path in step_folders(training.folder / "checkpoints") if looks_whole(path))
    step = next(map(step_of, whole), 0)
    if not step:
        return TrainingState(progress=Completion.MISSING)
    changes = tuple(_changes(training))
    if changes:
        return TrainingState(progress=Completion.CHANGED, step=step, changes=changes)
    is_done = training.steps is not None and step >= training.steps
    return TrainingState(progress=Completion.DONE if is_done else Completion.RESUMABLE, step=step)


def _changes(training: StudyTraining) -> Iterator[str]:
    """Settings with an effect that differ from the configuration in the run folder."""
    path = training.folder / "config.yaml"
    try:
        saved = effective_settings(load_run_file(RUN_TYPES, path))
    except UserError:
        yield f"{path} cannot be read by this version"
        return
    now = effective_settings(training.run)
    for key in sorted(saved.keys() | now.keys()):
        if saved.get(key) != now.get(key):
            yield f"{key}: trained with {_shown(saved, key)}, now {_shown(now, key)}"


def effective_settings(run: Run) -> dict[str, Any]:
    keys = {".".join(path): value for path, value in run_leaves(run)}
    return {key: value for key, value in keys.items() if not _is_without_effect(key)}


def _is_without_effect(key: str) -> bool:
    return any(key == each or key.startswith(f"{each}.") for each in WITHOUT_EFFECT)


def _shown(values: Mapping[str, Any], key: str) -> str:
    return yaml_flow(values[key]) if key in values else "nothing"


def changed_error(training: StudyTraining, state: TrainingState) -> UserError:
    more = len(state.changes) - MAX_CHANGES
    lines = [f"    {change}" for change in state.changes[:MAX_CHANGES]]
    lines += [f"    ... {more} more"] if more > 0 else []
    return UserError(
        "\n".join([f"trained to step {state.step:,} with other settings", *lines]),
        where=str(training.folder),
        next_step="undo the change, remove this folder to train again, or choose "
        "another name for the study",
    )


def overview(grid: Grid, states: Mapping[str, TrainingState]) -> str:
    """List all trainings with what each costs, the totals, and the changed settings."""
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
    title = f"Study {grid.study.name}: {len(grid.trainings)} trainings ({_states_text(states)})"
    header = ("training", "state", "images", "steps", "parameters", "FLOPs")
    parts = [plain_text(Table(title=title, header=header, rows=tuple(rows)))]
    left = [t for name, t in grid.trainings.items() if states[name].progress is not Completion.DONE]
    known = [training.flops for training in left if training.flops is not None]
    unknown = f", {len(left) - len(known)} of unknown cost" if len(known) < len(left) else ""
    parts.append(f"to train: {len(left)} trainings, {_flops(sum(known))} FLOPs{unknown}\n")
    for name, state in states.items():
        if state.progress is Completion.CHANGED:
            parts.append("\n".join([f"{name} was trained with other settings:", *state.changes]))
    return "\n".join(parts)


def _states_text(states: Mapping[str, TrainingState]) -> str:
    counts = Counter(state.progress for state in states.values())
    return ", ".join(f"{counts[p]} {p.value}" for p in Completion if counts[p])


def _count(number: int | None) -> str:
    return ABSENT if number is None else f"{number:,}"


def _flops(number: int | None) -> str:
    return ABSENT if number is None else f"{number:.3g}"
