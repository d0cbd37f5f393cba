"""Find out and show the states of a plan's stages, in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launch.jobs.queue import QueuedJob
from launch.jobs.status.reading import ACTIVE, RESULTS_NAME, RunState, RunStatus, read_status
from launch.jobs.status.text import ORDER, as_values, details_of, headline, shown_folder
from launch.plans.record import StageRecord, StepRecord, read_record

# What a stage without training writes last.
RESULTS = {"data_prep": "manifest.json", "evaluate": RESULTS_NAME}
SHOWN_IN_FULL = (RunState.RUNNING, RunState.PAUSED, RunState.FAILED)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageStatus:
    """One stage: one run, or those of a sweep."""

    name: str
    kind: str
    needs: tuple[str, ...]
    """Names of the stages before it."""
    runs: dict[str, RunStatus]
    """By name within the stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanStatus:
    folder: Path
    kind: str
    """chain or study."""
    stages: tuple[StageStatus, ...]

    @property
    def runs(self) -> list[RunStatus]:
        return [run for stage in self.stages for run in stage.runs.values()]


def read_plan(
    folder: Path, *, jobs: Sequence[QueuedJob] | None, note: str | None = None, now: float
) -> PlanStatus:
    """The states of all runs of a chain or a study. Arguments as of `read_status`."""
    record = read_record(folder)
    stages = [
        StageStatus(
            name=stage.name,
            kind=stage.kind,
            needs=stage.needs,
            runs={
                step.name.rpartition("/")[2]: _read(stage, step, jobs=jobs, note=note, now=now)
                for step in stage.steps
            },
        )
        for stage in record.stages
    ]
    return PlanStatus(folder=folder, kind=record.kind, stages=tuple(stages))


def _read(
    stage: StageRecord,
    step: StepRecord,
    *,
    jobs: Sequence[QueuedJob] | None,
    note: str | None,
    now: float,
) -> RunStatus:
    is_training = stage.kind not in RESULTS
    # The jobs of a data preparation are not in the folder of its shards.
    folder = Path(stage.jobs_folder).parent if stage.kind == "data_prep" else Path(step.folder)
    run = read_status(folder, jobs=jobs, note=note, now=now, job_id=step.job)
    if run.state not in ACTIVE and run.state is not RunState.FAILED and not is_training:
        result = Path(step.folder) / RESULTS[stage.kind]
        run = replace(run, state=RunState.FINISHED if result.exists() else RunState.NOT_STARTED)
    if run.state is RunState.NOT_STARTED and step.job is not None and jobs is not None:
        # SLURM cancels what needs a run that failed.
        run = replace(run, note=f"job {step.job} was cancelled before it started")
    return run


def plan_lines(plan: PlanStatus, *, now: float) -> list[str]:
    """The plan, then each stage with what is active or failed in it."""
    size = f" of {len(plan.stages)} stages" if plan.kind == "chain" else ""
    lines = [f"{shown_folder(plan.folder)}: {plan.kind}{size}"]
    for stage in plan.stages:
        after = f" (after {', '.join(stage.needs)})" if stage.needs else ""
        if len(stage.runs) == 1:
            [run] = stage.runs.values()
            lines.append(f"  {stage.name}{after}: {headline(run, now=now)}")
            lines += [f"    {line}" for line in details_of(run, now=now)]
            continue
        counts = Counter(run.state for run in stage.runs.values())
        listed = ", ".join(f"{counts[state]} {state}" for state in ORDER if counts[state])
        lines.append(f"  {stage.name}{after}: {len(stage.runs)} runs, {listed}")
        for name, run in stage.runs.items():
            if run.state in SHOWN_IN_FULL:
                lines.append(f"    {name}: {headline(run, now=now)}")
                lines += [f"      {line}" for line in details_of(run, now=now)]
    return lines


def plan_values(plan: PlanStatus) -> dict[str, Any]:
    """Plain values for JSON."""
    return {
        "name": plan.folder.name,
        "kind": plan.kind,
        "folder": str(plan.folder),
        "stages": [
            {
                "name": stage.name,
                "kind": stage.kind,
                "needs": list(stage.needs),
                "runs": {name: as_values(run) for name, run in stage.runs.items()},
            }
            for stage in plan.stages
        ],
    }
