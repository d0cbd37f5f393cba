"""Submit what a study lacks to SLURM: one array for each stage and set of resources.

Owns: the arrays, their dependencies, and refusing to submit a study twice.
Leaves out: submitting one array (`launch.jobs.submission`), and what is missing (`states`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from launch.jobs.job import StageJob
from launch.jobs.preparation import make_private, prepare_job
from launch.jobs.queue import NoAnswerError, depending_on, jobs_of, submitted_ids
from launch.jobs.snapshot import kept_code, planned_folder
from launch.jobs.submission import Submission, sbatch_text, submit_array
from launch.studies.grid import FINAL, TRIAL, Grid, StudyTraining
from launch.studies.selection import SelectingJob
from launch.studies.states import FINISHED, TrainingState
from vitscale.config.errors import UserError
from vitscale.runs.launching import LaunchSettings

# In the order in which they are submitted.
KINDS = ("pretrain", "finetune", TRIAL, FINAL)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingArray:
    """Trainings of one kind that ask for the same resources."""

    kind: str
    launch: LaunchSettings
    trainings: tuple[StudyTraining, ...]


def arrays(grid: Grid, states: Mapping[str, TrainingState]) -> list[TrainingArray]:
    """The arrays to submit, each after those that it waits for."""
    groups: dict[tuple[str, str], list[StudyTraining]] = {}
    for name, training in grid.trainings.items():
        if states[name].progress not in FINISHED:
            resources = training.run.launch.model_dump_json()
            groups.setdefault((training.kind, resources), []).append(training)
    found = [_array(grid, trainings) for trainings in groups.values()]
    return sorted(found, key=lambda array: KINDS.index(array.kind))


def _array(grid: Grid, trainings: list[StudyTraining]) -> TrainingArray:
    size = {"num_tasks": len(trainings), "max_running_tasks": grid.study.max_running_tasks}
    launch = trainings[0].run.launch.model_copy(update=size)
    return TrainingArray(kind=trainings[0].kind, launch=launch, trainings=tuple(trainings))


def job_name(grid: Grid, array: TrainingArray) -> str:
    return f"{grid.study.name}-{array.kind}"


def batch_scripts(grid: Grid, states: Mapping[str, TrainingState]) -> Iterator[str]:
    """The batch script of every array, as `submit` would submit it. Needs no SLURM."""
    for array in arrays(grid, states):
        folder = _folder(grid).absolute()
        text = sbatch_text(
            array.launch,
            name=job_name(grid, array),
            folder=folder,
            code=planned_folder(array.launch, folder),
            run_folders=[str(Path(each.run.folder).absolute()) for each in array.trainings],
        )
        after = ", after the pre-trainings" if any(t.needs for t in array.trainings) else ""
        after = ", after the trials" if any(t.candidates for t in array.trainings) else after
        yield f"# Array of {len(array.trainings)} x {array.kind}{after}\n{text.rstrip()}\n"


def submit(grid: Grid, states: Mapping[str, TrainingState]) -> list[tuple[str, Submission]]:
    """Submit all arrays: (name of the array, submission).

    A transfer waits until all arrays with a pre-training that it needs have ended, however they
    ended; it fails at its start if its own pre-training is not done. In the same way a final run
    waits for the trials that its value is chosen by, and chooses when it starts.
    Raises UserError if arrays of this study are still queued, or sbatch refuses one.
    """
    folder = _folder(grid).absolute()
    make_private(folder)
    _check_not_queued(Path(grid.study.folder))
    submitted: list[tuple[str, Submission]] = []
    array_of: dict[str, str] = {}
    for array in arrays(grid, states):
        names = {name for training in array.trainings for name in training.waits_for}
        needed = {array_of[name] for name in names if name in array_of}
        code = kept_code(array.launch, folder)
        submission = submit_array(
            [_job(grid, training, code=code) for training in array.trainings],
            launch=depending_on(array.launch, needed),
            name=job_name(grid, array),
            folder=folder,
            code=code,
        )
        array_of |= {training.name: submission.job_id for training in array.trainings}
        submitted.append((job_name(grid, array), submission))
    return submitted


def _job(grid: Grid, training: StudyTraining, *, code: Path | None) -> StageJob | SelectingJob:
    if not training.candidates:
        return prepare_job(training.run, cluster="slurm", code=code)[0]
    return SelectingJob(
        name=training.name,
        metric=grid.study.select_metric,
        trials={
            each.label: tuple(grid.trainings[name] for name in each.trials)
            for each in training.candidates
        },
        jobs={
            each.label: prepare_job(each.training.run, cluster="slurm", code=code)[0]
            for each in training.candidates
        },
    )


def _folder(grid: Grid) -> Path:
    return Path(grid.study.folder) / "slurm"


def _check_not_queued(study_folder: Path) -> None:
    """Two jobs of one run would wait for each other's lock and fail."""
    try:
        queued = submitted_ids(jobs_of(study_folder))
    except NoAnswerError as error:
        raise UserError(f"SLURM does not answer: {error}", next_step="try again later") from None
    if queued:
        raise UserError(
            f"jobs {', '.join(queued)} of this study are still queued or running",
            where=str(study_folder),
            next_step=f"wait for them, or end them: scancel {' '.join(queued)}; --results shows "
            "what is finished",
        )
