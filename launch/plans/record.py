"""Read and write plan.json: the stages of a chain or study, their run folders and SLURM jobs.

Leaves out: what is done, which the run folders tell (`states`).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitscale.config.errors import UserError
from vitscale.distributed.atomic_files import write_json

if TYPE_CHECKING:
    # Reading a record, which a status does, needs no run types.
    from launch.plans.stages import Plan, Stage

RECORD_NAME = "plan.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One run."""

    name: str
    """As of `Step`."""
    folder: str
    """Run folder, or folder of the shards; absolute."""
    job: str | None = None
    """Its last SLURM job, such as 4711 or 4711_3; of a data preparation that of the whole array.
    None on this machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRecord:
    """One stage, after those that it needs."""

    name: str
    kind: str
    """data_prep, pretrain, finetune, evaluate or study."""
    needs: tuple[str, ...]
    jobs_folder: str
    """Folder of the logs and batch scripts of its SLURM jobs; absolute."""
    steps: tuple[StepRecord, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRecord:
    kind: str
    """chain or study."""
    stages: tuple[StageRecord, ...] = ()
    """In order; empty before the plan was started."""


def write_record(plan: Plan, jobs: dict[str, str]) -> None:
    """jobs: name of a step -> its last SLURM job."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    stages = tuple(_record(stage, jobs) for stage in plan.stages)
    write_json(plan.folder / RECORD_NAME, asdict(PlanRecord(kind=plan.kind, stages=stages)))


def _record(stage: Stage, jobs: dict[str, str]) -> StageRecord:
    steps = tuple(
        StepRecord(
            name=step.name,
            folder=str(step.folder.expanduser().absolute()),
            job=jobs.get(step.name),
        )
        for step in stage.steps
    )
    return StageRecord(
        name=stage.name,
        kind=stage.kind,
        needs=stage.needs,
        jobs_folder=str(stage.jobs_folder),
        steps=steps,
    )


def read_record(folder: Path) -> PlanRecord:
    """The record of the plan in this folder. Raises UserError."""
    path = folder / RECORD_NAME
    try:
        values = json.loads(path.read_text())
        return PlanRecord(kind=values["kind"], stages=tuple(map(_stage, values["stages"])))
    except FileNotFoundError:
        return PlanRecord(kind="chain")
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"cannot be read ({type(error).__name__})"
        raise UserError(what, where=str(path), next_step="remove it") from None


def _stage(values: dict[str, Any]) -> StageRecord:
    steps = tuple(StepRecord(**each) for each in values["steps"])
    return StageRecord(**(values | {"needs": tuple(values["needs"]), "steps": steps}))


def recorded_jobs(folder: Path) -> dict[str, str]:
    """Name of a step -> its last SLURM job."""
    steps = [step for stage in read_record(folder).stages for step in stage.steps]
    return {step.name: step.job for step in steps if step.job is not None}
