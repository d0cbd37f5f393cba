"""Show the states of runs, one line for each.

Owns: the words and numbers of these lines.
Leaves out: the state itself (`run_states`), and what SLURM's own words mean (`reasons`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence

from launch.jobs.queue import QueuedJob
from launch.jobs.reasons import BY_ITSELF, why_it_waits
from launch.jobs.run_states import (
    ORDER,
    RESULTS_NAME,
    SUBMIT_AGAIN,
    RunState,
    RunStatus,
)
from vitscale.config.loader import shown_path
from vitscale.tracking.journal import format_duration

MAX_RESULTS = 4
# A run that has logged nothing for this long may hang.
QUIET_S = 60.0


def as_text(runs: Sequence[RunStatus], *, now: float) -> str:
    """All runs, active ones first, and their number in each state."""
    # Of runs in the same state, the newest comes first.
    ordered = sorted(
        runs, key=lambda run: (ORDER.index(run.state), -(run.since or 0.0))
    )
    lines = [line_of(run, now=now) for run in ordered]
    if len(runs) > 1:
        counts = Counter(run.state for run in runs)
        listed = ", ".join(
            f"{counts[state]} {state}" for state in ORDER if counts[state]
        )
        lines.append(f"{len(runs)} runs: {listed}")
    return "\n".join(lines)


def line_of(run: RunStatus, *, now: float) -> str:
    """Format one run: state, times, progress, speed, and the reason that it waits or failed.

    now: this machine's clock, for a run of which SLURM's is not known.
    """
    # Times of jobs are SLURM's, so its own clock measures them.
    logged = run.logged
    now = run.seen or now
    length = ""
    ago = ""
    if run.since is not None:
        length = format_duration(now - run.since)
        ago = f", {length} ago"
    at = ""
    if logged.step:
        at = f" at {_steps(run)}"

    if run.state is RunState.RUNNING:
        parts = [", ".join(_running(run, length, now=now)), run.place]
        # Its nodes may boot, or it is ending.
        if run.job is not None and run.job.state != "RUNNING":
            parts.append(waiting(run.job, now=now))
    elif run.job is not None:
        since = ""
        if run.since is not None:
            since = f" since {clock(run.since)} ({length})"
        parts = [f"{run.state}{since}{at}: {waiting(run.job, now=now)}"]
    elif run.state is RunState.FINISHED:
        finished = "finished"
        # The journal of an evaluation has image sizes as steps.
        if logged.step and not (run.folder / RESULTS_NAME).is_file():
            finished += f", {logged.step:,} steps"
        results = list(logged.results.items())[:MAX_RESULTS]
        if logged.loss is not None:
            results.append(("train/loss", logged.loss))
        shown = ", ".join(f"{name} {value:.4f}" for name, value in results)
        parts = [finished + ago, shown]
    elif run.failure is not None:
        parts = [f"{run.state}{at}{ago}: {run.failure.what}"]
        if run.log:
            parts.append(f"log {shown_path(run.log)}")
    elif run.state is RunState.STOPPED:
        stopped = f"{run.state}{at}{ago}"
        if run.why:
            stopped += f": {run.why}"
        parts = [stopped, SUBMIT_AGAIN]
    elif run.why:
        parts = [f"{run.state}: {run.why}; submit it again"]
    else:
        parts = [run.state]

    # Many restarts tell of a cause that no single one shows.
    if run.restarts:
        endings = ", ".join(
            f"{number} {ending}" for ending, number in run.restarts.items()
        )
        parts.append(f"restarted {sum(run.restarts.values())}x ({endings})")
    return f"{shown_path(run.folder)}: {'; '.join(filter(None, parts))}"


def _running(run: RunStatus, length: str, *, now: float) -> Iterator[str]:
    logged = run.logged
    if length:
        yield f"running for {length}"
    else:
        yield "running"

    # Both are of rank 0's clock; `run.since` may be of SLURM's.
    begun = run.since
    if run.attempt is not None and run.attempt.ended is None:
        begun = run.attempt.started
    if begun is not None and (logged.time is None or logged.time < begun):
        starting = "starting"
        if logged.checkpoint_step:
            starting += f" from step {logged.checkpoint_step:,}"
        yield starting
        return

    if logged.step:
        yield _steps(run)
    if logged.images_per_s is not None:
        yield f"{logged.images_per_s:,.0f} img/s"
    if logged.mfu is not None:
        yield f"MFU {logged.mfu:.1%}"
    if logged.time is None:
        return

    # No longer than the time from the start that has no steps: rank 0's clock may be slow.
    age = now - logged.time
    if run.since is not None and begun is not None:
        age = min(age, now - run.since - (logged.time - begun))
    if age > QUIET_S:
        yield f"last step {format_duration(age)} ago"
    # Its clock may be fast. A run that is late has no time left to show.
    age = max(0.0, age)
    if logged.eta_s is not None and logged.eta_s > age:
        yield f"{format_duration(logged.eta_s - age)} left"


def _steps(run: RunStatus) -> str:
    step = run.logged.step
    total = run.logged.total_steps
    if total is None:
        return f"step {step:,}"
    return f"step {step:,} of {total:,} ({step / total:.0%})"


def waiting(job: QueuedJob, *, now: float) -> str:
    """Explain why a job waits, with SLURM's own reason, and what to do or when it starts."""
    why, advice = why_it_waits(job)
    # An estimate means nothing for a job that somebody must release or change.
    if job.start is not None and job.start > now and advice == BY_ITSELF:
        advice = f"expected to start at {clock(job.start)}"
    return f"job {job.job_id} {why}; {advice}"


def format_size(num_bytes: float) -> str:
    """Three digits in units of a thousand, such as 293 kB or 1.5 GB."""
    size = num_bytes
    for unit in ("bytes", "kB", "MB", "GB"):
        # What is rounded to 1000 belongs to the next unit.
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.0f} TB"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """One line for each row, its cells padded to the widest one of their column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def clock(seconds: float) -> str:
    """Local time, with the date if it is not today."""
    moment = time.localtime(seconds)
    shown = "%Y-%m-%d %H:%M"
    if moment[:3] == time.localtime()[:3]:
        shown = "%H:%M"
    return time.strftime(shown, moment)
