"""Submit what a chain lacks to SLURM: each stage after those that it needs have ended well.

Owns: what is submitted, kept and cancelled, and the dependencies between the jobs.
Leaves out: one array (`launch.jobs.submission`), what SLURM knows (`launch.jobs.queue`).

A job waits for `afterok` of all jobs of the stages that it needs, with kill-on-invalid-dep: when
one of them fails, SLURM cancels all that follows, and the same command submits it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.chains.comparing import comparison_job
from launch.chains.graph import Chain, ChainStep, Stage
from launch.chains.record import recorded_jobs, write_record
from launch.chains.settings import ComparisonRun
from launch.chains.states import States
from launch.chains.tracking import children, open_parent
from launch.jobs.preparation import make_private, prepare_job, with_num_workers
from launch.jobs.queue import (
    NoAnswerError,
    QueuedJob,
    ask_slurm,
    depending_on,
    jobs_of,
    user_jobs,
)
from launch.jobs.snapshot import kept_code, planned_folder
from launch.jobs.submission import Submission, sbatch_text, submit_array
from vitscale.config.errors import UserError
from vitscale.runs.data_prep import DataPrepRun
from vitscale.runs.launching import LaunchSettings

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageArray:
    """Runs of one stage that ask for the same resources; one of them is a plain job."""

    stage: Stage
    launch: LaunchSettings
    steps: tuple[ChainStep, ...]

    @property
    def what(self) -> str:
        num = self.launch.num_tasks
        return f"array of {num} tasks" if num > 1 else "job"


def arrays_of(stage: Stage, steps: Iterable[ChainStep]) -> list[StageArray]:
    groups: dict[str, list[ChainStep]] = {}
    for step in steps:
        groups.setdefault(step.run.launch.model_dump_json(), []).append(step)
    found = []
    for each in groups.values():
        launch = each[0].run.launch
        if stage.kind != "data_prep":
            launch = launch.model_copy(update={"num_tasks": len(each)})
        found.append(StageArray(stage=stage, launch=launch, steps=tuple(each)))
    return found


def queued_jobs(chain: Chain) -> dict[str, QueuedJob]:
    """Name of a step -> its job that is queued or running; of an array one of its tasks.

    Raises UserError if SLURM does not answer.
    """
    recorded = recorded_jobs(chain.folder)
    try:
        jobs = user_jobs()
    except NoAnswerError as error:
        raise UserError(f"SLURM does not answer: {error}", next_step="try again later") from None
    found = {}
    for stage in chain.stages:
        alive = jobs_of(stage.jobs_folder.parent, jobs=jobs)
        for step in stage.steps:
            name = recorded.get(step.name)
            for job in alive:
                if name in (job.job_id, job.submitted_id):
                    found[step.name] = job
    return found


@dataclass(kw_only=True)
class ChainSubmission:
    """One command's submission of a chain."""

    chain: Chain
    states: States
    queued: dict[str, QueuedJob]
    say: Say
    submitted: list[Submission] = field(default_factory=list)
    _jobs: dict[str, str] = field(default_factory=dict)
    """Name of a step -> its last job."""
    _waits_for: dict[str, list[str]] = field(default_factory=dict)
    """Stage -> jobs that those after it wait for."""
    _is_new: set[str] = field(default_factory=set)
    """Stages of which something was submitted."""

    def submit(self) -> None:
        """Submit every run that is neither done, queued nor running.

        Raises UserError if sbatch refuses one; what was accepted before stays submitted.
        """
        self._jobs = recorded_jobs(self.chain.folder)
        for stage in self.chain.stages:
            kept = self._kept(stage)
            missing = [
                step
                for step in stage.steps
                if step.name not in kept and not self.states[step.name].is_done
            ]
            ids = [self._jobs[name] for name in kept]
            for job_id in dict.fromkeys(ids):
                self.say(f"kept      {stage.name}: job {job_id} is {self._state_of(job_id)}")
            if not missing and not kept:
                self.say(f"skipped   {stage.name}: done")
            self._waits_for[stage.name] = [*ids, *self._submit_stage(stage, missing)]

    def _state_of(self, job_id: str) -> str:
        job = next(j for j in self.queued.values() if job_id in (j.job_id, j.submitted_id))
        return job.state.lower()

    def _kept(self, stage: Stage) -> list[str]:
        """Steps with a job that stays. One that waits for jobs that have failed is cancelled."""
        queued = [step.name for step in stage.steps if step.name in self.queued]
        if not self._is_new & set(stage.needs):
            return queued
        waiting = [name for name in queued if self.queued[name].state == "PENDING"]
        for job_id in dict.fromkeys(self._jobs[name] for name in waiting):
            _cancel(job_id)
            self.say(f"cancelled {stage.name}: job {job_id} waited for jobs that have failed")
        return [name for name in queued if name not in waiting]

    def _submit_stage(self, stage: Stage, missing: Sequence[ChainStep]) -> list[str]:
        """Ids of the new jobs."""
        if not missing:
            return []
        needed = [job for name in stage.needs for job in self._waits_for[name]]
        make_private(stage.jobs_folder)
        parent = open_parent(stage, say=self.say)
        new = []
        for array in arrays_of(stage, children(stage, missing, parent)):
            code = kept_code(array.launch, stage.jobs_folder)
            submission = submit_array(
                list(_jobs(array, code)),
                launch=depending_on(array.launch, needed, how="afterok"),
                name=job_name(self.chain, stage),
                folder=stage.jobs_folder,
                code=code,
                independent=stage.kind == "data_prep" and array.launch.num_tasks > 1,
            )
            self._jobs |= dict(_ids(array, submission))
            # After each: a job that sbatch has accepted is known even if the next one is refused.
            write_record(self.chain, self._jobs)
            self.submitted.append(submission)
            self._is_new.add(stage.name)
            new.append(submission.job_id)
            after = f", after {' and '.join(needed)}" if needed else ""
            self.say(f"submitted {stage.name}: {array.what} {submission.job_id}{after}")
        return new


def job_name(chain: Chain, stage: Stage) -> str:
    return f"{chain.settings.name}-{stage.name}"


def batch_scripts(chain: Chain, stage: Stage, steps: Iterable[ChainStep]) -> Iterator[str]:
    """The batch scripts, without dependencies. Needs no SLURM."""
    for array in arrays_of(stage, steps):
        folder = stage.jobs_folder
        name, code = job_name(chain, stage), planned_folder(array.launch, folder)
        folders = [_run_folder(step) for step in array.steps]
        if stage.kind == "data_prep":
            folders *= array.launch.num_tasks
        text = sbatch_text(array.launch, name=name, folder=folder, code=code, run_folders=folders)
        yield f"# Stage {stage.name}: {array.what}\n{text.rstrip()}\n"


def _jobs(array: StageArray, code: Path | None) -> Iterator[Callable[[], Any]]:
    for step in array.steps:
        if isinstance(step.run, ComparisonRun):
            yield comparison_job(step.run)
            continue
        run = with_num_workers(step.run, num_cores=array.launch.cpus_per_task)
        job = prepare_job(run, cluster="slurm", code=code)[0]
        tasks = array.launch.num_tasks if isinstance(run, DataPrepRun) else 1
        yield from [job] * tasks


def _run_folder(step: ChainStep) -> str | None:
    """None for runs without attempts."""
    is_run = not isinstance(step.run, DataPrepRun | ComparisonRun)
    return str(step.folder.absolute()) if is_run else None


def _ids(array: StageArray, submission: Submission) -> Iterator[tuple[str, str]]:
    for number, step in enumerate(array.steps):
        is_task = submission.is_array and array.stage.kind != "data_prep"
        yield step.name, f"{submission.job_id}_{number}" if is_task else submission.job_id


def _cancel(job_id: str) -> None:
    try:
        ask_slurm("scancel", job_id)
    except NoAnswerError as error:
        raise UserError(f"scancel {job_id} failed: {error}", next_step="try again later") from None
