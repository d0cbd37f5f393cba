"""Follow a run to its end: rank 0's log over all attempts, and every change of state.

Leaves out: the state itself (`states`). Nothing here affects the run.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TextIO

from launch.jobs.processes import EXIT_INTERRUPTED, LogTail
from launch.jobs.queue import known_jobs
from launch.jobs.states import ACTIVE, RunState, RunStatus, newest_log, read_state
from launch.jobs.status_text import line_of, shown_folder
from vitscale.config.errors import EXIT_FAILED, EXIT_STOPPED_RESUMABLE, UserError

# squeue loads the controller of the whole site: it is asked at every fifth look at the log.
LOG_SECONDS, LOOKS = 1.0, 5
# Of a log that exists when following begins.
LAST_LINES = 20


def follow_run(folder: Path, *, output: TextIO) -> int:
    """Show the run's log and states until nothing runs or waits. Returns its exit code.

    0: finished; 75: stopped, and can be resumed; that of the failure's kind; else 1. 130 after
    Ctrl-C, which leaves the run alone. Raises UserError for an array, whose tasks have own logs.
    """
    run: RunStatus | None = None
    tail: LogTail | None = None
    try:
        while run is None or run.state in ACTIVE:
            before, run = run, _look(folder, run)
            tail = _copy_log(folder, tail, is_first=before is None, output=output)
            if before is None or _key(before) != _key(run):
                output.write(line_of(run, now=time.time()) + "\n")
                output.flush()
            for _ in range(LOOKS if run.state in ACTIVE else 0):
                time.sleep(LOG_SECONDS)
                tail = _copy_log(folder, tail, is_first=False, output=output)
    except KeyboardInterrupt:
        job = None if run is None else run.job
        what = f"job {job.job_id} continues; scancel {job.job_id} ends it" if job else "it goes on"
        again = f"python launch/status.py {shown_folder(folder)} --follow"
        output.write(f"\n{what}\nfollow it again: {again}\n")
        return EXIT_INTERRUPTED
    if run.failure is not None and run.failure.kind is not None:
        return run.failure.kind.exit_code
    known = {RunState.FINISHED: 0, RunState.STOPPED: EXIT_STOPPED_RESUMABLE}
    return known.get(run.state, EXIT_FAILED)


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


def _key(run: RunStatus) -> tuple[object, ...]:
    """What is shown when it changes; SLURM's estimate of the start changes all the time."""
    reason = run.job.reason if run.job and run.state is not RunState.RUNNING else None
    return run.state, reason, run.job and run.job.job_id


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
