"""Show runs: the state of each in a line, or one to its end with the log of rank 0.

Leaves out: the state itself (`states`). Nothing here affects a run.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from launch.jobs.processes import EXIT_INTERRUPTED, LogTail
from launch.jobs.queue import QueuedJob, known_jobs
from launch.jobs.states import ACTIVE, RESULTS_NAME, RunState, RunStatus, newest_log, read_state
from vitscale.config.errors import EXIT_STOPPED_RESUMABLE, UserError
from vitscale.tracking.console import format_duration

MAX_RESULTS = 4
# A run that has logged nothing for this long may hang.
QUIET_S = 60.0
ORDER = list(RunState)
# squeue loads the controller of the whole site.
FOLLOW_SECONDS = 4.0
# Of a log that exists when following begins.
LAST_LINES = 20
# JOB REASON CODES of `man squeue`, SLURM 22.05 to 24.11, by how they begin; the first one counts.
REASONS = {
    "Assoc": "your account has reached a limit",
    "BadConstraints": "asks for nodes or features that its partition does not have, or excludes "
    "all of them: it will never start",
    # cred_expire in slurm.conf: until the old credential has expired.
    "BeginTime": "waits for its start time; SLURM holds a requeued job back for two minutes",
    "DependencyNeverSatisfied": "waits for a job that has failed: it will never start",
    "Dependency": "waits for another job",
    "JobArrayTaskLimit": "launch.max_running_tasks tasks are running",
    "JobHeldAdmin": "held by an administrator",
    "JobHeldUser": "held by its user: `scontrol release` lets it start",
    "Max": "your account has reached a limit",
    "PartitionNodeLimit": "asks for more or fewer nodes than its partition allows: it will never "
    "start",
    "PartitionTimeLimit": "asks for more time than its partition allows: it will never start",
    "Priority": "jobs of higher priority are before it",
    "QOS": "its quality of service has reached a limit",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved",
    "Resources": "waits for free nodes",
    "launch_failed_requeued_held": "a node could not start it, so it is held: `scontrol release` "
    "tries again",
}


def as_text(runs: Sequence[RunStatus], *, now: float) -> str:
    """All runs, active ones first, and their number in each state."""
    ordered = sorted(runs, key=lambda run: (ORDER.index(run.state), -(run.since or 0.0)))
    lines = [line_of(run, now=now) for run in ordered]
    if len(runs) > 1:
        counts = Counter(run.state for run in runs)
        listed = ", ".join(f"{counts[state]} {state}" for state in ORDER if counts[state])
        lines.append(f"{len(runs)} runs: {listed}")
    return "\n".join(lines)


def line_of(run: RunStatus, *, now: float) -> str:
    """What the run does, since when, how far, how fast, until when, and why it waits or failed."""
    logged, attempt = run.logged, run.attempt
    length = "" if run.since is None else format_duration(now - run.since)
    at = f" at {_steps(run)}" if logged.step else ""
    ago = f", {length} ago" if length else ""
    if run.state is RunState.RUNNING:
        parts = [", ".join(_running(run, length, now=now)), run.place]
    elif run.job is not None:
        since = "" if run.since is None else f" since {clock(run.since)} ({length})"
        parts = [f"{run.state}{since}{at}: {waiting(run.job, now=now)}"]
    elif run.state is RunState.FINISHED:
        # The journal of an evaluation has image sizes as steps.
        has_steps = logged.step and not (run.folder / RESULTS_NAME).is_file()
        shown = list(logged.results.items())[:MAX_RESULTS]
        shown += [("train/loss", logged.loss)] if logged.loss is not None else []
        results = ", ".join(f"{name} {value:.4f}" for name, value in shown)
        parts = ["finished" + (f", {logged.step:,} steps" if has_steps else "") + ago, results]
    elif run.failure is not None:
        log = f"log {shown_folder(run.log)}" if run.log else ""
        parts = [f"{run.state}{at}{ago}: {run.failure.what}", log]
    elif run.state is RunState.STOPPED:
        why = f": {attempt.reason}" if attempt is not None and attempt.reason else ""
        parts = [f"{run.state}{at}{ago}{why}", "the same command resumes it"]
    else:
        parts = [f"{run.state}"]
    if run.restarts:
        endings = ", ".join(f"{number} {ending}" for ending, number in run.restarts.items())
        parts.append(f"restarted {sum(run.restarts.values())}x ({endings})")
    return f"{shown_folder(run.folder)}: {'; '.join(filter(None, parts))}"


def _running(run: RunStatus, length: str, *, now: float) -> Iterator[str]:
    logged = run.logged
    yield "running" + (f" for {length}" if length else "")
    # Without a line in the journal since this attempt began.
    if run.since is not None and (logged.time is None or logged.time < run.since):
        yield "starting" + (f" from step {logged.checkpoint_step:,}" * bool(logged.checkpoint_step))
        return
    if logged.step:
        yield _steps(run)
    if logged.images_per_s is not None:
        yield f"{logged.images_per_s:,.0f} img/s"
    if logged.mfu is not None:
        yield f"MFU {logged.mfu:.1%}"
    if logged.time is not None and now - logged.time > QUIET_S:
        yield f"last step {format_duration(now - logged.time)} ago"
    if logged.eta_s is not None and logged.time is not None:
        yield f"{format_duration(logged.eta_s - (now - logged.time))} left"


def _steps(run: RunStatus) -> str:
    step, total = run.logged.step, run.logged.total_steps
    return f"step {step:,}" if total is None else f"step {step:,} of {total:,} ({step / total:.0%})"


def waiting(job: QueuedJob, *, now: float) -> str:
    """Why a job waits, in plain words and in SLURM's own, and when SLURM expects it to start."""
    text = f"job {job.job_id} has not been looked at by the scheduler yet"
    if job.reason is not None:
        word = job.reason.replace(" ", "_")
        known = (plain for start, plain in REASONS.items() if word.startswith(start))
        text = f"job {job.job_id} {next(known, 'waits')} ({job.reason})"
    if job.start is not None and job.start > now:
        text += f"; expected to start at {clock(job.start)}"
    return text


def shown_folder(folder: Path) -> str:
    """The path, relative to the current folder where it is inside."""
    here = Path.cwd()
    absolute = folder.absolute()
    return str(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute)


def clock(seconds: float) -> str:
    """Local time, with the date if it is not today."""
    moment, today = time.localtime(seconds), time.localtime()
    is_today = moment[:3] == today[:3]
    return time.strftime("%H:%M" if is_today else "%Y-%m-%d %H:%M", moment)


# ---- following one run --------------------------------------------------------------------------


def follow_run(folder: Path, *, output: TextIO) -> int:
    """Show the run's log and states until nothing runs or waits. Returns its exit code.

    0: finished; 75: not, and can be resumed; that of the failure's kind. 130 after
    Ctrl-C, which leaves the run alone. Raises UserError for an array, whose tasks have own logs.
    """
    run: RunStatus | None = None
    tail: LogTail | None = None
    shown: object = None
    try:
        while run is None or run.state in ACTIVE:
            if run is not None:
                time.sleep(FOLLOW_SECONDS)
            run = _look(folder, run)
            path = newest_log(folder)
            if path is not None and (tail is None or tail.path != path):
                tail = LogTail(
                    path, output=output, last_lines=LAST_LINES if shown is None else None
                )
            if tail is not None:
                tail.copy()
            # SLURM's estimate of the start changes all the time.
            reason = run.job.reason if run.job and run.state is not RunState.RUNNING else None
            if shown != (shown := (run.state, reason, run.job and run.job.job_id)):
                print(line_of(run, now=time.time()), file=output, flush=True)
    except KeyboardInterrupt:
        job = None if run is None else run.job
        what = f"job {job.job_id} continues; scancel {job.job_id} ends it" if job else "it goes on"
        again = f"python launch/status.py {shown_folder(folder)} --follow"
        print(f"\n{what}\nfollow it again: {again}", file=output)
        return EXIT_INTERRUPTED
    if run.failure is not None:
        return run.failure.kind.exit_code
    return 0 if run.state is RunState.FINISHED else EXIT_STOPPED_RESUMABLE


def _look(folder: Path, before: RunStatus | None) -> RunStatus:
    """The state now; the one before if SLURM, which has the job, does not answer."""
    jobs = known_jobs()
    if jobs is None and before is not None and before.job is not None:
        return before
    run = read_state(folder, jobs)
    if run.job is not None and "_" in run.job.job_id:
        raise UserError(
            f"{shown_folder(folder)} has a job of several tasks, each with its own log",
            where="--follow",
            next_step=f"python launch/status.py {shown_folder(folder)}",
        )
    return run
