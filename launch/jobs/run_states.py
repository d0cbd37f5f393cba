"""Find out the state of a run: queued, running, paused, stopped, finished or failed.

Owns: the state and the reason for it, from the queue, the events, the journal and the newest
checkpoint. Changes nothing and takes no lock.
Leaves out: finding run folders (`run_folders`), and how a state is shown (`status_text`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import yaml

from launch.jobs.attempts import (
    Attempt,
    Ending,
    last_rows,
    read_attempts,
    saved_step,
)
from launch.jobs.queue import QueuedJob, jobs_of, jobs_with_script, known_jobs
from launch.jobs.reasons import WAITING_STATES, how_it_ended
from launch.jobs.run_folders import CONFIGS, newest, newest_log
from vitscale.config.errors import FailureKind
from vitscale.distributed.events import (
    Failure,
    TrainingStart,
    cause,
    read_failures,
    read_start,
)
from vitscale.distributed.processes import is_alive, node_name
from vitscale.tracking.journal import Row

# Of an evaluation, whose journal has image sizes as steps.
RESULTS_NAME = "results.json"
SUBMIT_AGAIN = "the same command resumes it"


class RunState(StrEnum):
    RUNNING = "running"
    QUEUED = "queued"
    """Its job has not started yet."""
    PAUSED = "paused"
    """Its job was requeued and resumes the run when it starts again."""
    FAILED = "failed"
    STOPPED = "stopped"
    """Nothing runs or waits; the same command resumes it."""
    NOT_STARTED = "not started"
    FINISHED = "finished"


ORDER = list(RunState)
ACTIVE = ORDER[:3]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedProgress:
    """Progress that a training has logged. Times are unix seconds."""

    step: int
    """Step of the last line in the journal, or of the newest checkpoint if that is later."""
    checkpoint_step: int
    """0 without a checkpoint."""
    total_steps: int | None
    """None before its first start."""
    eta_s: float | None
    """Seconds left at `time`, at the mean speed since the start; None before the second line."""
    time: float | None
    """Time of the last line in the journal."""
    images_per_s: float | None
    mfu: float | None
    """Model FLOP/s utilisation, 0 to 1; None where the device's rate is unknown."""
    loss: float | None
    results: dict[str, float]
    """Last values of the evaluations' metrics, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """One run now. Times are unix seconds."""

    folder: Path
    state: RunState
    since: float | None
    """Since when it is queued, paused or running, or when it ended."""
    job: QueuedJob | None
    """The job that runs, else the one that waits longest."""
    place: str
    """Job with its nodes, or process, that runs it; empty if it does not run."""
    logged: LoggedProgress
    attempt: Attempt | None
    restarts: dict[str, int]
    """Ending of attempts that were or will be followed by another one -> number of them."""
    failure: Failure | None
    log: Path | None
    """The newest log of rank 0."""
    why: str = ""
    """Why it stopped or has not started; empty if nothing says so."""
    seen: float | None = None
    """When SLURM answered, by its own clock; None: this machine's clock counts."""


class RunEnd(NamedTuple):
    """State of a run that neither runs nor waits, and why it has not finished."""

    state: RunState
    failure: Failure | None = None
    why: str = ""


# ---- the state --------------------------------------------------------------------------------


def read_state(folder: Path, jobs: Sequence[QueuedJob] | None) -> RunStatus:
    """Read the state of the run in `folder`.

    jobs: all jobs of the user, from `known_jobs`.
    """
    # Without SLURM's answer, the records alone say what is known.
    known = jobs or ()
    start = read_start(folder)
    logged = _read_logged(folder, start)

    # An attempt without an end runs, or its machine died.
    attempts = read_attempts(folder) or _attempts_of_tasks(folder)
    last = None
    open_attempt = None
    if attempts:
        last = attempts[-1]
        if last.ended is None:
            open_attempt = last

    # A job that runs says more about the run than those that wait for its end.
    job = min(
        jobs_of(folder, jobs=known),
        key=lambda job: job.state in WAITING_STATES,
        default=None,
    )
    place = ""
    since = None
    end = RunEnd(RunState.RUNNING)
    if job is not None:
        place = f"job {job.job_id}"
        if job.nodes:
            place += f" on {job.nodes}"
        if job.state in WAITING_STATES:
            since = job.submitted
            end = RunEnd(RunState.QUEUED)
            # It has run before, so SLURM or its batch script has requeued it.
            if last is not None and last.job_id == job.job_id:
                end = RunEnd(RunState.PAUSED)
        else:
            # SLURM's clock is the one that counts below; those of nodes may differ.
            since = job.start
            if since is None and open_attempt is not None:
                since = open_attempt.started
    elif pid := _live_pid(folder, open_attempt, start):
        place = f"process {pid} on this machine"
        if open_attempt is not None:
            since = open_attempt.started
        elif start is not None:
            since = start.time
    elif jobs is None and open_attempt is not None and open_attempt.cluster == "slurm":
        since = open_attempt.started
        nodes = ", ".join(open_attempt.nodes)
        place = f"job {open_attempt.job_id} on {nodes}, as its records say: SLURM does not answer"
    else:
        end = _end_of(folder, last, start, logged, jobs)
        since = logged.time
        if last is not None and last.ended is not None:
            since = last.ended

    # The last attempt of a run that is over was not followed by another one.
    followed = attempts
    if end.state not in ACTIVE:
        followed = attempts[:-1]
    restarts = Counter(
        str(attempt.kind or attempt.ending)
        for attempt in followed
        if attempt.ending not in (None, Ending.DONE)
    )

    clocks = [job.seen for job in jobs_with_script(folder, known) if job.seen]
    return RunStatus(
        folder=folder,
        state=end.state,
        since=since,
        job=job,
        place=place,
        logged=logged,
        attempt=last,
        restarts=dict(restarts),
        failure=end.failure,
        log=newest_log(folder),
        why=end.why,
        seen=max(clocks, default=None),
    )


def jobs_for(folders: Sequence[Path]) -> list[QueuedJob] | None:
    """The user's jobs, if one of these runs may have one; None if SLURM does not answer.

    A controller that hangs takes a minute, which runs that have ended do not need.
    """
    if any(map(_may_have_job, folders)):
        return known_jobs()
    return []


def _may_have_job(folder: Path) -> bool:
    """Return True if a script was submitted, and no attempt has reached the end since."""
    script = newest(folder.glob("slurm/*submission_file_*"))
    if script is None:
        return False

    # After an attempt that has reached the end, only a newer submission can have a job.
    attempts = read_attempts(folder) or _attempts_of_tasks(folder)
    if not attempts or attempts[-1].ending is not Ending.DONE:
        return True
    ended = attempts[-1].ended
    return ended is None or script.lstat().st_mtime > ended


def _attempts_of_tasks(folder: Path) -> list[Attempt]:
    """Return the newest attempt of a data preparation, whose tasks record their own.

    Of an array that of a failed task, if there is one.
    """
    attempts: list[Attempt] = []
    for depth in ("*/*", "*/*/*"):
        for path in folder.glob(f"{depth}/events"):
            attempts += read_attempts(path.parent)[-1:]
    if not attempts:
        return []

    # Jobs before the last one do not count any more.
    attempts.sort(key=lambda attempt: attempt.started)
    job_id = attempts[-1].job_id.partition("_")[0]
    failed = [
        attempt
        for attempt in attempts
        if attempt.job_id.partition("_")[0] == job_id
        and attempt.ending is Ending.FAILED
    ]
    return (failed or attempts)[-1:]


def _live_pid(
    folder: Path, attempt: Attempt | None, start: TrainingStart | None
) -> int | None:
    """Find a process of the run on this machine: launcher of an open attempt, else rank 0."""
    here = node_name()
    pids = []
    if attempt is not None and attempt.cluster == "local" and here in attempt.nodes:
        pids.append(attempt.pid)
    if start is not None and start.node == here:
        pids.append(start.pid)
    with suppress(OSError, ValueError):
        # An evaluation without a launcher has its lock alone: process 17 on n1.
        process, number, _, node = (folder / ".lock").read_text().split()
        if (process, node) == ("process", here):
            pids.append(int(number))

    for pid in pids:
        if pid is not None and is_alive(pid):
            return pid
    return None


# ---- of a run that neither runs nor waits -----------------------------------------------------


def _end_of(
    folder: Path,
    last: Attempt | None,
    start: TrainingStart | None,
    logged: LoggedProgress,
    jobs: Sequence[QueuedJob] | None,
) -> RunEnd:
    """Find out the state of a run without a job or process, and why it has not finished."""
    has_begun = last is not None or start is not None
    is_saved = (
        logged.total_steps is not None and logged.checkpoint_step >= logged.total_steps
    )
    is_done = last is not None and last.ending is Ending.DONE
    # An evaluation that was started without a launcher has no other record.
    is_evaluated = not has_begun and (folder / RESULTS_NAME).is_file()
    if is_saved or is_done or is_evaluated or _has_made_shards(folder):
        return RunEnd(RunState.FINISHED)

    # The batch script writes this where Python, which would record the attempt, does not start.
    begun = 0.0
    if last is not None:
        begun = last.ended or last.started
    for path in folder.glob("slurm/*/*.failed_starts"):
        if path.stat().st_mtime > begun:
            node = path.read_text().split()[-1]
            return _failed(f"Python did not start on {node}, or was killed", last)

    idle = RunState.NOT_STARTED
    if has_begun or logged.step:
        idle = RunState.STOPPED
    unrecorded = _unrecorded_end(folder, last, start, jobs, idle)
    if unrecorded is not None:
        return unrecorded

    # The record of the last attempt says the rest, unless it was cut short.
    if last is not None:
        if last.ending not in (None, Ending.FAILED):
            return RunEnd(idle, why=last.reason)
        lost = "no record of its end: it was cancelled, or its node died"
        return _failed(last.reason or f"{lost}; {SUBMIT_AGAIN}", last)

    if start is not None:
        # Started without a launcher of ours; its ranks have recorded why it failed, if they could.
        reports = read_failures(folder)
        culprit = cause([report for report in reports if report.time >= start.time])
        if culprit is not None:
            return RunEnd(RunState.FAILED, replace(culprit, what=culprit.text))
    return RunEnd(idle)


def _failed(what: str, last: Attempt | None) -> RunEnd:
    kind = FailureKind.OTHER
    if last is not None and last.kind is not None:
        kind = last.kind
    return RunEnd(RunState.FAILED, Failure(kind=kind, what=what))


def _unrecorded_end(
    folder: Path,
    last: Attempt | None,
    start: TrainingStart | None,
    jobs: Sequence[QueuedJob] | None,
    idle: RunState,
) -> RunEnd | None:
    """Find out how the newest job ended where no attempt says so.

    It may have ended before its first start or, after a requeue, before the next one. SLURM
    says how, for minutes. None if the records say all, or SLURM does not answer.
    idle: the state of a run whose job has not failed.
    """
    # submitit's links to JOB/JOB_submission.sh stay also where a job's folder is removed.
    links = [
        path for path in folder.glob("slurm/.submission_file_*") if path.is_symlink()
    ]
    submission = newest(links)
    if submission is None or jobs is None:
        return None
    job_id = submission.readlink().name.partition("_")[0]

    # The job has an attempt in the record, or has ended before it could record one.
    reason = ""
    before = " before the run started"
    if last is not None and last.job_id.partition("_")[0] == job_id:
        if last.ended is None or last.ending is Ending.ENDED_BY_SLURM:
            # It was cut short, and only SLURM may say why.
            before = ""
        elif last.is_requeued:
            reason = f"{last.reason}; requeued, but "
            before = " before the run started again"
        else:
            # Its attempt says how it ended.
            return None
    else:
        begun = 0.0
        if last is not None:
            begun = last.started
        elif start is not None:
            begun = start.time
        # Started by hand, or by an earlier job, since the submission.
        if begun > submission.lstat().st_mtime:
            return None

    # SLURM forgets a job some minutes after its end.
    ended = [
        job
        for job in jobs_with_script(folder, jobs)
        if job.has_ended and job.submitted_id == job_id
    ]
    if ended:
        how, advice = how_it_ended(ended[-1])
        what = f"{reason}job {job_id} {how}{before}"
        if advice:
            what += f"; {advice}"
        if ended[-1].state == "CANCELLED":
            return RunEnd(idle, why=what)
        return _failed(f"{what}; {SUBMIT_AGAIN}", last)

    # The attempt that is open says as much as is known.
    if not before:
        return None
    what = f"{reason}job {job_id} ended{before}"
    # Lines that the site or the user has added run before the first rank.
    if not reason and any(folder.glob(f"slurm/{job_id}/*_log.out")):
        what += f": see its log, and launch.setup; {SUBMIT_AGAIN}"
        return _failed(what, last)
    return RunEnd(idle, why=f"{what}, and SLURM no longer says why")


def _has_made_shards(folder: Path) -> bool:
    """Return True if the output of the newest data preparation has its manifest."""
    config = newest(folder.glob(CONFIGS))
    if config is None:
        return False
    # A configuration may be of another version, or of another stage without an output.
    with suppress(OSError, yaml.YAMLError, LookupError, TypeError):
        output = Path(yaml.safe_load(config.read_text())["output"])
        return (output / "manifest.json").is_file()
    return False


# ---- what it has logged -----------------------------------------------------------------------


def _read_logged(folder: Path, start: TrainingStart | None) -> LoggedProgress:
    """Read the run's journal and checkpoints.

    Missing files and unreadable lines count as not logged.
    """
    rows = last_rows(folder)
    metrics: dict[str, float] = {}
    for row in rows:
        metrics |= row.metrics

    saved = saved_step(folder)
    step = saved
    logged_at = None
    if rows:
        # A checkpoint may be newer than the last line.
        step = max(rows[-1].step, saved)
        logged_at = rows[-1].time

    total_steps = None
    eta_s = None
    if start is not None:
        total_steps = start.total_steps
        eta_s = _eta(rows, start)

    # The name counts, whichever group the metric is in.
    by_name = {key.rpartition("/")[2]: value for key, value in metrics.items()}
    return LoggedProgress(
        step=step,
        checkpoint_step=saved,
        total_steps=total_steps,
        eta_s=eta_s,
        time=logged_at,
        images_per_s=by_name.get("images_per_s"),
        mfu=by_name.get("mfu"),
        loss=metrics.get("train/loss"),
        results={
            key: value for key, value in metrics.items() if key.startswith("val/")
        },
    )


def _eta(rows: Sequence[Row], start: TrainingStart) -> float | None:
    """Seconds left at the last line, at the mean speed since the start; None if not known."""
    # The speed before a restart may be that of another number of nodes.
    since = [row for row in rows if row.time >= start.time]
    if not since:
        return None
    first = since[0]
    last = since[-1]
    if last.step == first.step:
        return None
    s_per_step = (last.time - first.time) / (last.step - first.step)
    return s_per_step * (start.total_steps - last.step)
