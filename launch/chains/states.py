"""Find out which runs of a chain are done, by their folders alone.

A training is done when its last checkpoint is whole, a data preparation when its manifest is there,
an evaluation while its results are newer than all that it reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.chains.load import Chain, ChainStep
from launch.comparison.differences import has_effect
from launch.jobs.preparation import RUN_TYPES
from launch.jobs.states import RESULTS_NAME
from vitscale.checkpoint.folders import MANIFEST, looks_whole, step_folders, step_of
from vitscale.config.errors import UserError, UserErrors
from vitscale.config.loader import load_run_file
from vitscale.config.section import Run
from vitscale.data.index import MANIFEST_NAME, read_manifest
from vitscale.distributed.events import read_start
from vitscale.runs.data_prep import DataPrepRun
from vitscale.tracking.run_facts import flatten_params


@dataclass(frozen=True, kw_only=True, slots=True)
class StepState:
    text: str
    """done, missing, old, resumable (step N) or changed."""
    finished: float | None = None
    """When it was finished, unix seconds; None: it is not done."""
    error: UserError | None = None
    """Why the run is neither skipped nor run."""

    @property
    def is_done(self) -> bool:
        return self.finished is not None


States = Mapping[str, StepState]
"""Name of the step -> state."""


def chain_states(chain: Chain) -> dict[str, StepState]:
    """The state of every run."""
    states: dict[str, StepState] = {}
    for step in chain.steps:
        states[step.name] = step_state(step, states)
    return states


def check_unchanged(states: States) -> None:
    """Raise UserErrors for runs made with other settings; none is used or overwritten."""
    if errors := [state.error for state in states.values() if state.error is not None]:
        raise UserErrors(errors)


def step_state(step: ChainStep, states: States) -> StepState:
    """states: at least of the steps that it needs."""
    if isinstance(step.run, DataPrepRun):
        return _data_prep_state(step, step.run)
    needs = [states[name] for name in step.needs]
    if step.kind != "evaluate":
        return _training_state(step, complete=all(state.is_done for state in needs))
    finished = _time_of(step.folder / RESULTS_NAME)
    if finished is None:
        return StepState(text="missing")
    files = sorted(step.folder.glob("*/config-*.yaml"), key=lambda path: path.stat().st_mtime)
    is_newest = all(state.is_done and finished >= (state.finished or 0) for state in needs)
    if not is_newest or not files or _changes_since(step.run, files[-1]):
        return StepState(text="old")
    return StepState(text="done", finished=finished)


def _data_prep_state(step: ChainStep, run: DataPrepRun) -> StepState:
    folder = step.folder.expanduser()
    finished = _time_of(folder / MANIFEST_NAME)
    if finished is None:
        return StepState(text="missing")
    made, now = read_manifest(folder).config, run.model_dump(mode="json")
    if changes := _changes(made, {key: now[key] for key in made.keys() & now.keys()}):
        return _changed("exists already, made with other settings", changes, folder)
    return StepState(text="done", finished=finished)


def _training_state(step: ChainStep, *, complete: bool) -> StepState:
    """complete: whether all that it needs is done."""
    folders = step_folders(step.folder / "checkpoints")
    newest = next((path for path in folders if looks_whole(path)), None)
    if newest is None:
        return StepState(text="missing")
    at = step_of(newest)
    changes = _changes_since(step.run, step.folder / "config.yaml")
    if not complete:
        changes = [f"what it starts from is missing or incomplete: {', '.join(step.needs)}"]
    if changes:
        return _changed(f"trained to step {at:,} with other settings", changes, step.folder)
    start = read_start(step.folder)
    if start is None or at < start.total_steps:
        return StepState(text=f"resumable (step {at:,})")
    return StepState(text="done", finished=_time_of(newest / MANIFEST))


def _changed(what: str, changes: list[str], folder: Path) -> StepState:
    error = UserError(
        "\n    ".join([what, *changes]),
        where=str(folder),
        next_step="undo the change, remove this folder to make it again, or rename the chain",
    )
    return StepState(text="changed", error=error)


def _changes_since(run: Run, path: Path) -> list[str]:
    """Settings with an effect that differ from a configuration that was run."""
    try:
        made = load_run_file(RUN_TYPES, path).model_dump(mode="json")
    except UserError:
        return [f"{path} cannot be read by this version"]
    return _changes(made, run.model_dump(mode="json"))


def _changes(made: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Settings with an effect that differ."""
    before, after = flatten_params(made), flatten_params(now)
    return [
        f"{key}: made with {before.get(key, 'nothing')}, now {after.get(key, 'nothing')}"
        for key in sorted(before.keys() | after.keys())
        if has_effect(key) and before.get(key) != after.get(key)
    ]


def _time_of(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return None
