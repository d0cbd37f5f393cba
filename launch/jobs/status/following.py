"""Follow a run to its end: rank 0's log over all attempts, and every change of state.

Leaves out: the state itself (`states`). Nothing here affects the run.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TextIO

from launch.jobs.processes import LogTail
from launch.jobs.queue import known_jobs
from launch.jobs.status.states import ACTIVE, RunState, RunStatus, newest_log, read_state
from launch.jobs.status.text import line_of, shown_folder
from vitscale.config.errors import EXIT_FAILED, EXIT_STOPPED_RESUMABLE, UserError

LOG_SECONDS = 1.0
# squeue loads the controller of the whole site.
STATE_SECONDS = 5.0
# Of a log that exists when following begins.
LAST_LINES = 20
EXIT_INTERRUPTED = 130


def follow_run(folder: Path, *, output: TextIO) -> int:
    """Show the run's log and states until nothing runs or waits. Returns its exit code.

    0: finished; 75: stopped, and can be resumed; that of the failure's kind; else 1. 130 after
    Ctrl-C, which leaves the run alone. Raises UserError for an array, whose tasks have own logs.
    """
    run: RunStatus | None = None
    try:
        tail: LogTail | None = None
        looked = float("-inf")
        while True:
            if time.monotonic() - looked >= STATE_SECONDS:
                before, run, looked = run, _look(folder, run), time.monotonic()
                tail = _copy_log(folder, tail, is_first=before is None, output=output)
                if _has_changed(before, run):
                    output.write(line_of(run, now=time.time()) + "\n")
                    output.flush()
                if run.state not in ACTIVE:
                    return _exit_code(run)
            tail = _copy_log(folder, tail, is_first=False, output=output)
            time.sleep(LOG_SECONDS)
    except KeyboardInterrupt:
        job = None if run is None else run.job
        what = (
            f"job {job.job_id} continues; scancel {job.job_id} ends it" if job else "it continues"
        )
        again = f"python launch/status.py {shown_folder(folder)} --follow"
        output.write(f"\n{what}\nfollow it again: {again}\n")
        return EXIT_INTERRUPTED


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


def _has_changed(before: RunStatus | None, run: RunStatus) -> bool:
    """Whether to say so; SLURM's estimate of the start changes all the time."""

    def key(status: RunStatus) -> tuple[object, ...]:
        job = status.job
        reason = job.reason if job and status.state is not RunState.RUNNING else None
        return status.state, reason, job and job.job_id

    return before is None or key(before) != key(run)


def _copy_log(
    folder: Path, tail: LogTail | None, *, is_first: bool, output: TextIO
) -> LogTail | None:
    """Show what was added to the newest log of rank 0; of the first one its last lines."""
    path = newest_log(folder)
    if path is not None and (tail is None or tail.path != path):
        tail = LogTail(path, output=output)
        if is_first:
            content = path.read_bytes()
            tail.position = len(content) - len(b"".join(content.splitlines(True)[-LAST_LINES:]))
    if tail is not None:
        tail.copy()
    return tail


def _exit_code(run: RunStatus) -> int:
    if run.failure is not None and run.failure.kind is not None:
        return run.failure.kind.exit_code
    known = {RunState.FINISHED: 0, RunState.STOPPED: EXIT_STOPPED_RESUMABLE}
    return known.get(run.state, EXIT_FAILED)
