"""Show the states of runs as text, a paragraph each, or as plain values for JSON."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launch.jobs.queue import QueuedJob
from launch.jobs.status.reading import RunState, RunStatus
from vitscale.tracking.console import format_duration

MAX_RESULTS = 6
ORDER = list(RunState)
# JOB REASON CODES of `man squeue`, SLURM 22.05 to 24.11.
REASONS = {
    "AssociationJobLimit": "your account has reached its limit of jobs",
    "BadConstraints": "asks for nodes or features that its partition does not have, or excludes "
    "all of them: it will never start",
    # cred_expire in slurm.conf: until the old credential has expired.
    "BeginTime": "waits for its start time; SLURM holds a requeued job back for two minutes",
    "Cleaning": "SLURM still cleans up after the last attempt",
    "Dependency": "waits for another job",
    "DependencyNeverSatisfied": "waits for a job that has failed: it will never start",
    "JobArrayTaskLimit": "launch.max_running_tasks tasks are running",
    "JobHeldAdmin": "held by an administrator",
    "JobHeldUser": "held by its user: `scontrol release` lets it start",
    "Licenses": "waits for a license",
    "NodeDown": "a node that it needs is down",
    "PartitionDown": "its partition starts no jobs at present",
    "PartitionInactive": "its partition accepts no jobs at present",
    "PartitionNodeLimit": "asks for more or fewer nodes than its partition allows: it will never "
    "start",
    "PartitionTimeLimit": "asks for more time than its partition allows: it will never start",
    "Priority": "jobs of higher priority are before it",
    "Reservation": "waits for its reservation to begin",
    "Resources": "waits for free nodes",
}
# Families of reasons with many members.
PREFIXES = {
    "Assoc": "your account has reached a limit",
    "Max": "your account has reached a limit",
    "QOS": "its quality of service has reached a limit",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved",
    "launch_failed_requeued_held": "a node could not start it, so it is held: `scontrol release` "
    "tries again",
}


def as_text(runs: Sequence[RunStatus], *, now: float) -> str:
    """All runs, active ones first, and their number in each state."""
    ordered = sorted(runs, key=lambda run: (ORDER.index(run.state), -(run.since or 0.0)))
    parts = ["\n".join(lines_of(run, now=now)) for run in ordered]
    if len(runs) > 1:
        counts = Counter(run.state for run in runs)
        listed = ", ".join(f"{counts[state]} {state}" for state in ORDER if counts[state])
        parts.append(f"{len(runs)} runs: {listed}")
    return "\n".join(parts)


def lines_of(run: RunStatus, *, now: float) -> list[str]:
    """The paragraph of one run; its first line names it."""
    lines = details_of(run, now=now)
    return [f"{shown_folder(run.folder)}: {headline(run, now=now)}", *(f"  {x}" for x in lines)]


def details_of(run: RunStatus, *, now: float) -> list[str]:
    """The lines below the first one."""
    return [line for line in _details(run, now=now) if line]


def headline(run: RunStatus, *, now: float) -> str:
    """The state, and how far the run is."""
    logged = run.logged
    since = "" if run.since is None else f" since {clock(run.since)} ({age(now - run.since)})"
    if run.state is RunState.RUNNING:
        if run.is_starting:
            at = f", starting from step {logged.step:,}" if logged.step else ", starting"
            return f"running{since}{at}"
        left = ""
        if logged.eta_s is not None and logged.time is not None:
            left = f", {format_duration(logged.eta_s - (now - logged.time))} left"
        return f"running, {_steps(run)}{left}" if logged.step else f"running{since}"
    if run.state in (RunState.QUEUED, RunState.PAUSED):
        return f"{run.state}{since}" + (f" at {_steps(run)}" if logged.step else "")
    ago = "" if run.since is None else f", {age(now - run.since)} ago"
    if run.state is RunState.FINISHED:
        has_steps = logged.step and not run.is_evaluation
        return "finished" + (f", {logged.step:,} steps" if has_steps else "") + ago
    return f"{run.state}" + (f" at {_steps(run)}" if logged.step else "") + ago


def _steps(run: RunStatus) -> str:
    step, total = run.logged.step, run.logged.total_steps
    return f"step {step:,}" if total is None else f"step {step:,} of {total:,} ({step / total:.0%})"


def _details(run: RunStatus, *, now: float) -> Iterator[str]:
    if run.tasks:
        yield "tasks: " + ", ".join(f"{num} {state}" for state, num in run.tasks.items())
    if run.state in (RunState.QUEUED, RunState.PAUSED) and run.job is not None:
        yield waiting(run.job, now=now)
    if run.state is RunState.RUNNING:
        yield _place(run)
        yield _speed(run)
        yield run.note or ""
    if run.state is RunState.NOT_STARTED:
        yield run.note or ""
    if run.state is RunState.FINISHED:
        shown = list(run.logged.results.items())[:MAX_RESULTS]
        if run.logged.loss is not None:
            shown.append(("train/loss", run.logged.loss))
        yield ", ".join(f"{name} {value:.4f}" for name, value in shown)
    yield _restarted(run)
    if run.failure is not None:
        yield run.failure.what
        yield run.failure.error_line or ""
        yield f"log: {run.failure.log}" if run.failure.log is not None else ""
    elif run.state is RunState.STOPPED:
        if run.attempt is not None and run.attempt.reason:
            yield run.attempt.reason
        yield "the same command resumes it"


def waiting(job: QueuedJob, *, now: float) -> str:
    """Why a job waits, and when SLURM expects it to start."""
    text = f"job {job.job_id}: {plain_reason(job.reason)}"
    if job.start is not None and job.start > now:
        text += f"; expected to start at {clock(job.start)}"
    return text


def _place(run: RunStatus) -> str:
    if (job := run.job) is not None:
        place = f"job {job.job_id}" + (f" on {job.nodes}" if job.nodes else "")
    elif run.pid is not None:
        place = f"process {run.pid} on this machine"
    elif run.attempt is not None:
        place = f"job {run.attempt.job_id} on {', '.join(run.attempt.nodes)}"
    else:
        return ""
    number = run.attempt.number if run.attempt is not None else 1
    return place + (f", attempt {number}" if number > 1 else "")


def _speed(run: RunStatus) -> str:
    logged, parts = run.logged, []
    if logged.images_per_s is not None and not run.is_starting:
        parts.append(f"{logged.images_per_s:,.0f} img/s")
    if logged.mfu is not None and not run.is_starting:
        parts.append(f"MFU {logged.mfu:.1%}")
    if logged.loss is not None:
        parts.append(f"loss {logged.loss:.4f}")
    if run.log_age_s is not None:
        parts.append(f"last written to the log {age(run.log_age_s)} ago")
    return ", ".join(parts)


def _restarted(run: RunStatus) -> str:
    restarts = run.restarts
    if not restarts.number:
        return ""
    times = "once" if restarts.number == 1 else f"{restarts.number} times"
    endings = ", ".join(f"{number} {ending}" for ending, number in restarts.endings.items())
    text = f"restarted {times}: {endings}; {age(restarts.seconds_repeated)} of training repeated"
    if restarts.seconds_between:
        text += f", {age(restarts.seconds_between)} between attempts"
    return text


def shown_folder(folder: Path) -> str:
    """The path, relative to the current folder where it is inside."""
    here = Path.cwd()
    absolute = folder.absolute()
    return str(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute)


def age(seconds: float) -> str:
    """A length of time in its largest unit: 12 s, 5 min, 3.2 h, 4 days."""
    seconds = max(0.0, seconds)
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.0f} days"


def clock(seconds: float) -> str:
    """Local time, with the date if it is not today."""
    moment, today = time.localtime(seconds), time.localtime()
    is_today = moment[:3] == today[:3]
    return time.strftime("%H:%M" if is_today else "%Y-%m-%d %H:%M", moment)


def as_values(run: RunStatus) -> dict[str, Any]:
    """Plain values for JSON, keys as in `RunStatus`; times are unix seconds."""
    values: dict[str, Any] = _plain(asdict(run))
    return {"name": run.folder.name, **values}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value


def plain_reason(reason: str | None) -> str:
    """Explain in plain words why SLURM keeps a job waiting, followed by SLURM's own word."""
    if reason is None:
        return "the scheduler has not looked at it yet"
    word = reason.replace(" ", "_")
    found = REASONS.get(word)
    if found is None:
        found = next((text for start, text in PREFIXES.items() if word.startswith(start)), None)
    return f"SLURM says {reason}" if found is None else f"{found} ({reason})"
