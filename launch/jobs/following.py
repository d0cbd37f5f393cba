"""Follow one run to its end: its states, and the log of rank 0."""

from __future__ import annotations

import time
from pathlib import Path
from shlex import quote

from launch.jobs.processes import LogTail
from launch.jobs.queue import known_jobs
from launch.jobs.run_folders import newest_log, shown_folder
from launch.jobs.run_states import ACTIVE, RunState, read_state
from launch.jobs.status_text import line_of
from vitscale.config.errors import EXIT_INTERRUPTED, EXIT_STOPPED_RESUMABLE, UserError

# squeue loads the controller of the whole site.
FOLLOW_SECONDS = 4.0
# Of a log that exists when following begins.
LAST_LINES = 20


def follow_run(folder: Path) -> int:
    """Show the run's log and states until nothing runs or waits. Returns its exit code.

    0: finished; 75: not, and can be resumed; that of the failure's kind. 130 after
    Ctrl-C, which leaves the run alone. Raises UserError for an array, whose tasks have own logs.
    """
    status = f"vitscale status {quote(shown_folder(folder))}"
    run = read_state(folder, known_jobs())
    if run.job is not None and "_" in run.job.job_id:
        raise UserError(
            f"{shown_folder(folder)} has a job of several tasks, each with its own log",
            where="--follow",
            next_step=status,
        )

    tail = None
    shown = None
    try:
        while True:
            # A start writes a new log, which is shown from its beginning.
            path = newest_log(folder)
            if path is not None and (tail is None or tail.path != path):
                last_lines = None
                if shown is None:
                    last_lines = LAST_LINES
                tail = LogTail(path, last_lines=last_lines)
            if tail is not None:
                tail.copy()

            # SLURM's estimate of the start changes all the time, so it is not compared.
            reason = None
            job_id = None
            if run.job is not None:
                job_id = run.job.job_id
                if run.state is not RunState.RUNNING:
                    reason = run.job.reason
            current = (run.state, reason, job_id)
            if current != shown:
                print(line_of(run, now=time.time()), flush=True)
                shown = current

            if run.state not in ACTIVE:
                break
            time.sleep(FOLLOW_SECONDS)
            # SLURM, which has the job, may not answer.
            jobs = known_jobs()
            if jobs is not None or run.job is None:
                run = read_state(folder, jobs)
    except KeyboardInterrupt:
        what = "it goes on"
        if run.job is not None:
            job_id = run.job.job_id
            what = f"job {job_id} continues; scancel {job_id} ends it"
        print(f"\n{what}\nfollow it again: {status} --follow")
        return EXIT_INTERRUPTED

    if run.failure is not None:
        return run.failure.kind.exit_code
    if run.state is RunState.FINISHED:
        return 0
    return EXIT_STOPPED_RESUMABLE
