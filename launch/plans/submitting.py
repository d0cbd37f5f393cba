"""Submit what a plan lacks to SLURM: runs after those that they need.

Owns: what is submitted, kept and cancelled, and the dependencies between the jobs.
Leaves out: one array (`launch.jobs.submission`), what SLURM knows (`launch.jobs.queue`).

A job waits for `afterok` of all jobs of the stages that its stage needs, with kill-on-invalid-dep:
when one of them fails, SLURM cancels all that follows. Within a study it waits for `afterany`: a
transfer fails at its start if its own pre-training is not done.
In both cases the same command submits again what is not done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.jobs.preparation import make_private, prepare_job, with_num_workers
from launch.jobs.queue import (
    NoAnswerError,
    QueuedJob,
    ask_slurm,
    depending_on,
    jobs_of,
    submitted_ids,
    user_jobs,
)
from launch.jobs.snapshot import kept_code, planned_folder
from launch.jobs.submission import Submission, sbatch_text, submit_array
from launch.plans.record import recorded_jobs, write_record
from launch.plans.stages import Plan, Stage, Step
from launch.plans.states import States
from vitscale.config.errors import UserError
from vitscale.runs.data_prep import DataPrepRun
from vitscale.runs.launching import LaunchSettings

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobArray:
    """Runs of one stage that ask for the same resources; one of them is a plain job."""

    stage: Stage
    name: str
    launch: LaunchSettings
    steps: tuple[Step, ...]

    @property
    def what(self) -> str:
        num = self.launch.num_tasks
        return f"array of {num} tasks" if num > 1 else "job"


def groups_of(stage: Stage) -> list[list[Step]]:
    """The steps by the name of their array, each group after those that it needs."""
    groups: dict[str, list[Step]] = {}
    depth: dict[str, int] = {}
    for step in stage.steps:
        groups.setdefault(step.array, []).append(step)
        depth[step.short_name] = 1 + max((depth[name] for name in step.needs), default=0)
    return sorted(groups.values(), key=lambda steps: max(depth[s.short_name] for s in steps))


def arrays_of(stage: Stage, steps: Iterable[Step]) -> list[JobArray]:
    """steps: of one group."""
    by_resources: dict[str, list[Step]] = {}
    for step in steps:
        by_resources.setdefault(step.run.launch.model_dump_json(), []).append(step)
    found = []
    for each in by_resources.values():
        launch = each[0].run.launch
        if stage.kind != "data_prep":
            limit = None if stage.grid is None else stage.grid.study.max_running_tasks
            size = {"num_tasks": len(each)}
            launch = launch.model_copy(
                update=size | ({} if limit is None else {"max_running_tasks": limit})
            )
        found.append(
            JobArray(stage=stage, name=each[0].array, launch=launch, steps=tuple(each))
        )  # fmt: skip
    return found


def missing_steps(stage: Stage, states: States) -> list[JobArray]:
    """The arrays of the runs that are not done."""
    return [
        array
        for steps in groups_of(stage)
        for array in arrays_of(stage, [s for s in steps if not states[s.name].is_done])
    ]


def queued_jobs(plan: Plan) -> dict[str, QueuedJob]:
    """Name of a step -> its job that is queued or running; of an array one of its tasks.

    Raises UserError if SLURM does not answer, or has a job of this plan that is not recorded.
    """
    recorded = recorded_jobs(plan.folder)
    try:
        jobs = user_jobs()
    except NoAnswerError as error:
        raise UserError(f"SLURM does not answer: {error}", next_step="try again later") from None
    found: dict[str, QueuedJob] = {}
    for stage in plan.stages:
        alive = jobs_of(stage.jobs_folder.parent, jobs=jobs)
        known = {recorded.get(step.name) for step in stage.steps}
        known |= {name.partition("_")[0] for name in known if name is not None}
        unknown = submitted_ids(job for job in alive if job.submitted_id not in known)
        if unknown and stage.kind != "data_prep":  # whose jobs share the work
            # Two jobs of one training would wait for each other's lock and fail.
            raise UserError(
                f"jobs {', '.join(unknown)} of this {plan.kind} are queued or running, and not in "
                "its record",
                where=str(plan.folder),
                next_step=f"wait for them, or end them: scancel {' '.join(unknown)}",
            )
        for step in stage.steps:
            name = recorded.get(step.name)
            for job in alive:
                if name in (job.job_id, job.submitted_id):
                    found[step.name] = job
    return found


@dataclass(kw_only=True)
class PlanSubmission:
    """One command's submission of a plan."""

    plan: Plan
    states: States
    queued: dict[str, QueuedJob]
    say: Say
    submitted: list[Submission] = field(default_factory=list)
    _jobs: dict[str, str] = field(default_factory=dict)
    """Name of a step -> its last job."""
    _stage_jobs: dict[str, list[str]] = field(default_factory=dict)
    """Stage -> jobs that those after it wait for."""
    _is_new: set[str] = field(default_factory=set)
    """Stages and steps that were submitted now."""

    def submit(self) -> None:
        """Submit every run that is neither done, queued nor running.

        Raises UserError if sbatch refuses one; what was accepted before stays submitted.
        """
        self._jobs = recorded_jobs(self.plan.folder)
        for stage in self.plan.stages:
            self._stage_jobs[stage.name] = []
            for steps in groups_of(stage):
                self._submit_group(stage, steps)

    def _submit_group(self, stage: Stage, steps: Sequence[Step]) -> None:
        array = steps[0].array
        kept = self._kept(stage, steps)
        ids = list(dict.fromkeys(self._jobs[step.name] for step in kept))
        for job_id in ids:
            self.say(f"kept      {array}: job {job_id} is {self._state_of(job_id)}")
        kept_names = {step.name for step in kept}
        missing = [
            step
            for step in steps
            if step.name not in kept_names and not self.states[step.name].is_done
        ]
        if not missing and not kept:
            self.say(f"skipped   {array}: done")
        ids += [self._submit(stage, each) for each in arrays_of(stage, missing)]
        self._stage_jobs[stage.name] += ids

    def _state_of(self, job_id: str) -> str:
        job = next(j for j in self.queued.values() if job_id in (j.job_id, j.submitted_id))
        return job.state.lower()

    def _kept(self, stage: Stage, steps: Sequence[Step]) -> list[Step]:
        """Steps with a job that stays. One that waits for jobs that have failed is cancelled."""
        queued = [step for step in steps if step.name in self.queued]
        waiting = [
            step
            for step in queued
            if self.queued[step.name].state == "PENDING"
            and self._is_new & {*stage.needs, *step.needs}
        ]
        for job_id in dict.fromkeys(self._jobs[step.name] for step in waiting):
            _cancel(job_id)
            self.say(f"cancelled {steps[0].array}: job {job_id} waited for jobs that have failed")
        return [step for step in queued if step not in waiting]

    def _submit(self, stage: Stage, array: JobArray) -> str:
        """Id of the new job."""
        before = [job for name in stage.needs for job in self._stage_jobs[name]]
        within = self._needed_within(stage, array)
        launch = depending_on(array.launch, within)
        make_private(stage.jobs_folder)
        code = kept_code(array.launch, stage.jobs_folder)
        submission = submit_array(
            list(_jobs(array, code)),
            launch=depending_on(launch, before, how="afterok"),
            name=array.name,
            folder=stage.jobs_folder,
            code=code,
            independent=stage.kind == "data_prep" and array.launch.num_tasks > 1,
        )
        self._jobs |= dict(_ids(array, submission))
        # After each: a job that sbatch has accepted is known even if the next one is refused.
        write_record(self.plan, self._jobs)
        self.submitted.append(submission)
        self._is_new |= {stage.name, *(step.short_name for step in array.steps)}
        after = f", after {' and '.join([*before, *within])}" if before or within else ""
        self.say(f"submitted {array.name}: {array.what} {submission.job_id}{after}")
        return submission.job_id

    def _needed_within(self, stage: Stage, array: JobArray) -> list[str]:
        """The jobs of the same stage that have runs which the array needs."""
        needed = {name for step in array.steps for name in step.needs}
        active = [
            step.name
            for step in stage.steps
            if step.short_name in needed
            and (step.short_name in self._is_new or step.name in self.queued)
        ]
        return sorted({self._jobs[name].partition("_")[0] for name in active})


def batch_script(array: JobArray) -> str:
    """The batch script of an array, without dependencies. Needs no SLURM."""
    folder = array.stage.jobs_folder
    is_run = array.stage.kind != "data_prep"
    return sbatch_text(
        array.launch,
        name=array.name,
        folder=folder,
        code=planned_folder(array.launch, folder),
        run_folders=[str(step.folder.absolute()) for step in array.steps if is_run],
    )


def _jobs(array: JobArray, code: Path | None) -> Iterator[Callable[[], Any]]:
    for step in array.steps:
        run = with_num_workers(step.run, num_cores=array.launch.cpus_per_task)
        job = prepare_job(run, cluster="slurm", code=code)[0]
        yield from [job] * (array.launch.num_tasks if isinstance(run, DataPrepRun) else 1)


def _ids(array: JobArray, submission: Submission) -> Iterator[tuple[str, str]]:
    for number, step in enumerate(array.steps):
        is_task = submission.is_array and array.stage.kind != "data_prep"
        yield step.name, f"{submission.job_id}_{number}" if is_task else submission.job_id


def _cancel(job_id: str) -> None:
    try:
        ask_slurm("scancel", job_id)
    except NoAnswerError as error:
        raise UserError(f"scancel {job_id} failed: {error}", next_step="try again later") from None
