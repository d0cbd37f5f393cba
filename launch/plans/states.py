"""Find out which runs of a plan are done, by their folders.

A training is done when its last checkpoint is whole, a data preparation when its manifest is there.
An evaluation is done while its results are newer than all that it reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.inference.settings import EvaluateRun
from launch.jobs.status.reading import RESULTS_NAME
from launch.plans.stages import Plan, Stage, Step
from launch.studies.grid import StudyTraining
from launch.studies.states import (
    Completion,
    TrainingState,
    changed_error,
    effective_settings,
    state_of,
    states_of,
)
from vitscale.checkpoint.folders import MANIFEST, step_folder
from vitscale.config.errors import UserError, UserErrors
from vitscale.config.loader import load_run_file
from vitscale.data.index import MANIFEST_NAME, read_manifest
from vitscale.runs.data_prep import DataPrepRun

# Settings of a data preparation that do not change the shards.
EXECUTION = ("output", "num_workers", "launch", "source.path")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepState:
    progress: Completion
    text: str
    finished: float | None = None
    """Time stamp of the file that finishing writes, in seconds since the epoch."""
    error: UserError | None = None
    """Why it can be neither skipped nor run."""

    @property
    def is_done(self) -> bool:
        return self.progress is Completion.DONE


States = Mapping[str, StepState]
"""Name of the step -> state."""


def plan_states(plan: Plan) -> dict[str, StepState]:
    """The state of every run."""
    states: dict[str, StepState] = {}
    for stage in plan.stages:
        states |= stage_states(plan, stage, states)
    return states


def check_unchanged(states: States) -> None:
    """Raise UserErrors for runs made with other settings; none is used or overwritten."""
    if errors := [state.error for state in states.values() if state.error is not None]:
        raise UserErrors(errors)


def stage_states(plan: Plan, stage: Stage, before: States) -> dict[str, StepState]:
    """before: the states of the stages that it needs."""
    inputs = [step for each in plan.inputs_of(stage) for step in each.steps]
    missing = next((step for step in inputs if not before[step.name].is_done), None)
    newest = max((before[step.name].finished or 0.0 for step in inputs), default=0.0)
    of_grid = {} if stage.grid is None else states_of(stage.grid)
    return {
        step.name: _state(step, missing=missing, newest=newest)
        if step.training is None
        else training_state(step.training, of_grid.get(step.short_name), missing=missing)
        for step in stage.steps
    }


def _state(step: Step, *, missing: Step | None, newest: float) -> StepState:
    """missing: an input that is not done. newest: when the last input was finished."""
    if isinstance(step.run, DataPrepRun):
        return _data_prep_state(step, step.run)
    finished = _time_of(step.folder / RESULTS_NAME)
    is_current = missing is None and finished is not None and finished >= newest
    if not is_current or not _is_unchanged(step):
        return StepState(progress=Completion.MISSING, text="missing" if finished is None else "old")
    return StepState(progress=Completion.DONE, text="done", finished=finished)


def training_state(
    training: StudyTraining, state: TrainingState | None = None, *, missing: Step | None = None
) -> StepState:
    """state: in its grid; None: by its own folder alone."""
    state = state or state_of(training)
    if state.step and missing is not None:
        what = f"its input {missing.name} is missing or incomplete"
        state = TrainingState(progress=Completion.CHANGED, step=state.step, changes=(what,))
    error = finished = None
    if state.progress is Completion.CHANGED:
        error = changed_error(training, state)
    if state.progress is Completion.DONE:
        folder = step_folder(training.folder / "checkpoints", state.step)
        finished = _time_of(folder / MANIFEST)
    return StepState(progress=state.progress, text=state.text, finished=finished, error=error)


def _data_prep_state(step: Step, run: DataPrepRun) -> StepState:
    folder = step.folder.expanduser()
    finished = _time_of(folder / MANIFEST_NAME)
    if finished is None:
        return StepState(progress=Completion.MISSING, text="missing")
    made, now = dict(_flat(read_manifest(folder).config)), dict(_flat(run.model_dump(mode="json")))
    changed = [
        f"{key}: made with {made[key]}, now {now[key]}"
        for key in sorted(made.keys() & now.keys())
        if made[key] != now[key] and not key.startswith(EXECUTION)
    ]
    if not changed:
        return StepState(progress=Completion.DONE, text="done", finished=finished)
    error = UserError(
        "\n".join(["exists already, made with other settings", *(f"    {c}" for c in changed)]),
        where=str(folder),
        next_step="undo the change, remove this folder, or set another output",
    )
    return StepState(progress=Completion.CHANGED, text="changed", error=error)


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, child in value.items():
            yield from _flat(child, f"{prefix}{key}.")
    else:
        yield prefix.removesuffix("."), value


def _is_unchanged(step: Step) -> bool:
    """Whether the last configuration that was run is the present one."""
    assert isinstance(step.run, EvaluateRun)
    files = sorted(step.folder.glob("*/config-*.yaml"), key=lambda path: path.stat().st_mtime)
    if not files:
        return False
    try:
        saved = load_run_file(EvaluateRun, files[-1])
    except UserError:
        return False  # of another version
    return effective_settings(saved) == effective_settings(step.run)


def _time_of(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return None
