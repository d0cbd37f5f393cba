"""Show the states of runs as text, a line each."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from launch.jobs.queue import QueuedJob
from launch.jobs.states import RESULTS_NAME, RunState, RunStatus
from vitscale.tracking.console import format_duration

MAX_RESULTS = 4
# A run that has logged nothing for this long may hang.
QUIET_S = 60.0
ORDER = list(RunState)
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
    parts = [_headline(run, now=now)]
    if run.state in (RunState.QUEUED, RunState.PAUSED) and run.job is not None:
        parts[0] += f": {waiting(run.job, now=now)}"
    if run.state is RunState.RUNNING:
        parts.append(run.place)
    if run.state is RunState.FINISHED:
        shown = list(run.logged.results.items())[:MAX_RESULTS]
        if run.logged.loss is not None:
            shown.append(("train/loss", run.logged.loss))
        parts.append(", ".join(f"{name} {value:.4f}" for name, value in shown))
    if run.failure is not None:
        parts[0] += f": {run.failure.what}"
        parts.append(f"log {shown_folder(run.log)}" if run.log else "")
    if run.state is RunState.STOPPED:
        parts[0] += f": {run.attempt.reason}" if run.attempt and run.attempt.reason else ""
        parts.append("the same command resumes it")
    if run.restarts:
        endings = ", ".join(f"{number} {ending}" for ending, number in run.restarts.items())
        parts.append(f"restarted {sum(run.restarts.values())}x ({endings})")
    return f"{shown_folder(run.folder)}: {'; '.join(filter(None, parts))}"


def _headline(run: RunStatus, *, now: float) -> str:
    logged = run.logged
    length = "" if run.since is None else format_duration(now - run.since)
    if run.state is RunState.RUNNING:
        words = ["running" + (f" for {length}" if length else "")]
        # Without a line in the journal since this attempt began.
        if run.since is not None and (logged.time is None or logged.time < run.since):
            at = f" from step {logged.checkpoint_step:,}" if logged.checkpoint_step else ""
            return ", ".join([*words, f"starting{at}"])
        if logged.step:
            words.append(_steps(run))
        if logged.images_per_s is not None:
            words.append(f"{logged.images_per_s:,.0f} img/s")
        if logged.mfu is not None:
            words.append(f"MFU {logged.mfu:.1%}")
        if logged.time is not None and now - logged.time > QUIET_S:
            words.append(f"last step {format_duration(now - logged.time)} ago")
        if logged.eta_s is not None and logged.time is not None:
            words.append(f"{format_duration(logged.eta_s - (now - logged.time))} left")
        return ", ".join(words)
    if run.state in (RunState.QUEUED, RunState.PAUSED):
        since = "" if run.since is None else f" since {clock(run.since)} ({length})"
        return f"{run.state}{since}" + (f" at {_steps(run)}" if logged.step else "")
    ago = f", {length} ago" if length else ""
    if run.state is RunState.FINISHED:
        has_steps = logged.step and not (run.folder / RESULTS_NAME).is_file()
        return "finished" + (f", {logged.step:,} steps" if has_steps else "") + ago
    return f"{run.state}" + (f" at {_steps(run)}" if logged.step else "") + ago


def _steps(run: RunStatus) -> str:
    step, total = run.logged.step, run.logged.total_steps
    return f"step {step:,}" if total is None else f"step {step:,} of {total:,} ({step / total:.0%})"


def waiting(job: QueuedJob, *, now: float) -> str:
    """Why a job waits, and when SLURM expects it to start."""
    text = f"job {job.job_id} {plain_reason(job.reason)}"
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


def plain_reason(reason: str | None) -> str:
    """Explain in plain words why SLURM keeps a job waiting, followed by SLURM's own word."""
    if reason is None:
        return "the scheduler has not looked at it yet"
    word = reason.replace(" ", "_")
    found = next((text for start, text in REASONS.items() if word.startswith(start)), None)
    return f"SLURM says {reason}" if found is None else f"{found} ({reason})"
