"""Stages of runs that need each other: those of a chain, or the one stage of a study.

Leaves out: the files that they are read from (`chains`, `launch.studies`), what is done (`states`),
running them here (`running`) and on SLURM (`submitting`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from launch.jobs.preparation import LaunchableRun, job_folder
from launch.studies.grid import Grid, StudyTraining, expand, with_costs
from launch.studies.settings import StudyRun
from vitscale.runs.data_prep import DataPrepRun


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One run."""

    name: str
    """RUN in a study; in a chain STAGE, or STAGE/RUN if the stage has several runs."""
    run: LaunchableRun
    num_tasks: int
    array: str
    """Name of its SLURM job; runs with the same name and resources are one array."""
    training: StudyTraining | None = None
    """Of a pre-training or fine-tuning: the run with its length, as far as the shards are known."""

    @property
    def short_name(self) -> str:
        """The name without the stage."""
        return self.name.rpartition("/")[2]

    @property
    def needs(self) -> tuple[str, ...]:
        """Short names of the steps of the same stage that must be done before."""
        needs = None if self.training is None else self.training.needs
        return () if needs is None else (needs,)

    @property
    def folder(self) -> Path:
        """The run folder; for a data preparation, the folder of the shards."""
        return Path(self.run.output if isinstance(self.run, DataPrepRun) else self.run.folder)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Runs that may run at the same time, except where one of them needs another."""

    name: str
    kind: str
    """The `stage` of its run file; study for a whole study."""
    needs: tuple[str, ...]
    """Stages that must be done before."""
    folder: Path
    steps: tuple[Step, ...]
    """Each after those that it needs."""
    grid: Grid | None = None
    """Of a study or a sweep."""

    @property
    def jobs_folder(self) -> Path:
        """Folder of the logs and records of its SLURM jobs."""
        run = self.steps[0].run
        if isinstance(run, DataPrepRun):
            return job_folder(run, cluster="slurm")
        return (self.folder / "slurm").absolute()

    def with_trainings(self, trainings: Mapping[str, StudyTraining]) -> Stage:
        """The stage with other trainings, by the short names of their steps."""
        steps = tuple(
            replace(step, run=training.run, training=training)
            if (training := trainings.get(step.short_name)) is not None
            else step
            for step in self.steps
        )
        grid = self.grid
        if grid is not None:
            grid = replace(grid, trainings={**grid.trainings, **trainings})
        return replace(self, steps=steps, grid=grid)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A chain or a study with all of its runs, validated."""

    name: str
    kind: str
    """chain or study."""
    folder: Path
    stages: tuple[Stage, ...]
    """Each after those that it needs."""

    def inputs_of(self, stage: Stage) -> list[Stage]:
        return [each for each in self.stages if each.name in stage.needs]


def load_study(study: StudyRun, cluster: str, num_tasks: int | None = None) -> Plan:
    """A study as a plan of one stage, every run validated.

    num_tasks: processes of each run; None: as its `launch` section says.
    Raises UserErrors that name the invalid runs.
    """
    grid = expand(study, cluster=cluster, num_tasks=num_tasks)
    steps = tuple(
        Step(
            name=name,
            run=training.run,
            num_tasks=num_tasks or training.run.launch.nodes * training.run.launch.tasks_per_node,
            array=f"{study.name}-{training.kind}",
            training=training,
        )
        for name, training in grid.trainings.items()
    )
    folder = Path(study.folder)
    stage = Stage(name=study.name, kind="study", needs=(), folder=folder, steps=steps, grid=grid)
    return Plan(name=study.name, kind="study", folder=folder, stages=(stage,))


def as_known_now(stage: Stage) -> Stage:
    """The stage with the lengths of its runs read again: their shards may have been made since."""
    trainings = {
        step.short_name: with_costs(step.training, num_tasks=step.num_tasks)
        for step in stage.steps
        if step.training is not None
    }
    return stage.with_trainings(trainings)
