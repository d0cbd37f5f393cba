"""Find out the state of a run: queued, running, paused, stopped, finished or failed.

Owns: combining what SLURM, the run folder's lock, attempts, journal and task records say.
Leaves out: reading journal and log (`progress`), records (`tasks`), and showing (`text`).

Changes nothing and takes no lock: a run that starts at this moment is not disturbed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from launch.jobs.attempts import FAILURES, FINAL, Attempt, Ending, read_attempts
from launch.jobs.queue import QueuedJob, jobs_of
from launch.jobs.status.progress import LoggedProgress, log_age, read_logged
from launch.jobs.status.tasks import JobTasks, RunFailure, find_failure, newest_tasks
from vitscale.tracking.console import LOG_NAME
from vitscale.tracking.journal import JOURNAL_NAME

LOCK_NAME = ".lock"
LOCKS = Path("/proc/locks")
# Of an evaluation, whose journal has image sizes as steps.
RESULTS_NAME = "results.json"
# JOB STATE CODES of `man squeue`, of jobs that have nodes or wait for them.
WAITING_STATES = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "SUSPENDED")


class RunState(StrEnum):
    RUNNING = "running"
    QUEUED = "queued"
    """Its job has not started yet."""
    PAUSED = "paused"
    """Its job was requeued and resumes the run when it starts again."""
    FAILED = "failed"
    STOPPED = "stopped"
    """Nothing runs or waits; submitting again resumes."""
    NOT_STARTED = "not started"
    FINISHED = "finished"


ACTIVE = (RunState.RUNNING, RunState.QUEUED, RunState.PAUSED)


def current_job(jobs: Sequence[QueuedJob]) -> QueuedJob | None:
    """The job that runs, else the one that waits longest."""
    running = (job for job in jobs if job.state not in WAITING_STATES)
    return next(running, jobs[0] if jobs else None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Restarts:
    """The attempts that another one followed or will follow."""

    number: int
    endings: dict[str, int]
    """How they ended -> how many."""
    seconds_repeated: float
    """Training after the last checkpoint of each, done again."""
    seconds_between: float
    """From the end of each attempt to the start of the next."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """One run now. Times are unix seconds."""

    folder: Path
    state: RunState
    since: float | None
    """Since when it is queued, paused or running, or when it ended."""
    jobs: tuple[QueuedJob, ...]
    """Its jobs in the queue, queued or running, oldest first."""
    pid: int | None
    """Process that holds the run folder on this machine."""
    logged: LoggedProgress
    log_age_s: float | None
    attempt: Attempt | None
    """The newest one."""
    restarts: Restarts
    failure: RunFailure | None
    tasks: dict[str, int]
    """State -> number, of a job whose tasks share work (data preparation); else empty."""
    note: str | None = None
    """What could not be found out."""

    @property
    def is_evaluation(self) -> bool:
        return (self.folder / RESULTS_NAME).is_file()

    @property
    def job(self) -> QueuedJob | None:
        return current_job(self.jobs)

    @property
    def is_starting(self) -> bool:
        """Running, without a line in the journal since this attempt began."""
        if self.state is not RunState.RUNNING or self.since is None:
            return False
        return self.logged.time is None or self.logged.time < self.since


def read_status(
    folder: Path,
    *,
    jobs: Sequence[QueuedJob] | None,
    note: str | None = None,
    now: float,
) -> RunStatus:
    """The state of the run in `folder`.

    jobs: all jobs of the user, from `user_jobs`; None: SLURM was not asked or did not answer.
    note: why.
    """
    attempts, logged = read_attempts(folder), read_logged(folder)
    last = attempts[-1] if attempts else None
    tasks = newest_tasks(folder)
    live = tuple(jobs_of(folder, jobs=jobs or ()))
    pid = lock_holder(folder) or tasks.local_pid
    state = _live_state(live, last, tasks) or (RunState.RUNNING if pid is not None else None)
    if state is None:
        is_open = last is not None and last.ended is None and last.cluster == "slurm"
        state = RunState.RUNNING if is_open and jobs is None else None
        note = note if state is not None else None
    else:
        note = None
    failure = None
    if state is None:
        state, failure = _ended_state(folder, last, tasks, logged)
    return RunStatus(
        folder=folder,
        state=state,
        since=_since(state, live, last, logged, tasks),
        jobs=live,
        pid=pid,
        logged=logged,
        log_age_s=log_age([folder / LOG_NAME, folder / JOURNAL_NAME, *tasks.logs], now=now),
        attempt=last,
        restarts=_restarts(attempts, state),
        failure=failure,
        tasks=tasks.counts(live),
        note=note,
    )


def _live_state(
    live: Sequence[QueuedJob], last: Attempt | None, tasks: JobTasks
) -> RunState | None:
    if not live:
        return None
    if any(job.state not in WAITING_STATES for job in live):
        return RunState.RUNNING
    started = {last.job_id} if last is not None else set()
    started |= {tasks.folder.name} if tasks.folder is not None else set()
    ids = {job.job_id for job in live}
    return RunState.PAUSED if ids & started else RunState.QUEUED


def _ended_state(
    folder: Path, last: Attempt | None, tasks: JobTasks, logged: LoggedProgress
) -> tuple[RunState, RunFailure | None]:
    """The state of a run without a job or process."""
    is_evaluated = last is None and (folder / RESULTS_NAME).is_file()
    if logged.is_done or is_evaluated or (last is not None and last.ending is Ending.DONE):
        return RunState.FINISHED, None
    failure = find_failure(tasks, last, folder=folder)
    if last is not None:
        if last.ended is None or last.ending in (*FAILURES, *FINAL):
            return RunState.FAILED, failure
        return RunState.STOPPED, None
    if failure is not None:
        return RunState.FAILED, failure
    if tasks.all_done:
        return RunState.FINISHED, None
    has_started = logged.step or tasks.records
    return (RunState.STOPPED if has_started else RunState.NOT_STARTED), None


def _since(
    state: RunState,
    live: Sequence[QueuedJob],
    last: Attempt | None,
    logged: LoggedProgress,
    tasks: JobTasks,
) -> float | None:
    if state in (RunState.QUEUED, RunState.PAUSED):
        return min((job.submitted for job in live if job.submitted is not None), default=None)
    if state is RunState.RUNNING:
        if last is not None and last.ended is None:
            return last.started
        starts = [job.start for job in live if job.start is not None]
        if not starts and tasks.is_local and tasks.folder is not None:
            # Its name has the time of its start; nothing is created in it later than its records.
            return min(path.stat().st_mtime for path in (tasks.folder, *tasks.records))
        return min(starts, default=None)
    return last.ended if last is not None and last.ended is not None else logged.time


def _restarts(attempts: Sequence[Attempt], state: RunState) -> Restarts:
    followed = [a for a in attempts if a.ended is not None]
    if state not in ACTIVE and followed and followed[-1] is attempts[-1]:
        followed.pop()
    waits = [
        max(0.0, after.started - before.ended)
        for before, after in zip(attempts, attempts[1:], strict=False)
        if before.ended is not None
    ]
    return Restarts(
        number=len(followed),
        endings=dict(Counter(str(a.ending) for a in followed if a.ending is not None)),
        seconds_repeated=sum(a.seconds_lost or 0.0 for a in followed),
        seconds_between=sum(waits),
    )


def lock_holder(folder: Path) -> int | None:
    """The process on this machine that holds the run folder's lock.

    Read from the kernel's table: trying the lock could make a run fail that starts just now.
    """
    path = folder / LOCK_NAME
    try:
        inode = path.stat().st_ino
        lines = LOCKS.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        words = line.split()
        # 1: FLOCK ADVISORY WRITE PID MAJOR:MINOR:INODE START END
        if "FLOCK" not in words[:2] or not words[-3].endswith(f":{inode}"):
            continue
        pid = int(words[-4])
        if pid > 0 and _has_open(pid, path):
            return pid
    return None


def _has_open(pid: int, path: Path) -> bool:
    """Whether a process has this file open: an inode number alone is not unique."""
    try:
        files = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False
    for file in files:
        try:
            if os.path.samefile(file, path):
                return True
        except OSError:  # closed meanwhile
            continue
    return False
