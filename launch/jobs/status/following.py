"""Follow a run to its end: rank 0's log over all attempts, and every change of state.

Owns: what is announced between the lines of the log, and the exit code. The log itself announces
attempts.
Leaves out: the state itself (`reading`). Nothing here affects the run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from launch.jobs.attempts import Ending
from launch.jobs.monitor import LogTail
from launch.jobs.queue import NoAnswerError, QueuedJob, user_jobs
from launch.jobs.status.reading import ACTIVE, RunState, RunStatus, read_status
from launch.jobs.status.tasks import LOG_SUFFIX, newest_tasks
from launch.jobs.status.text import lines_of, shown_folder, waiting
from vitscale.config.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_STOPPED_RESUMABLE, UserError

LOG_SECONDS = 1.0
# squeue loads the controller of the whole site.
STATE_SECONDS = 5.0
# Of a log that exists when following begins.
LAST_LINES = 20
EXIT_INTERRUPTED = 130


def follow_run(folder: Path, *, output: TextIO) -> int:
    """Show the run's log and states until nothing runs or waits. Returns its exit code.

    The code is that of `exit_code`; 130 after Ctrl-C, which leaves the run alone.
    Raises UserError for a job of many tasks, each of which has its own log.
    """
    follower = _Follower(folder=folder, output=output)
    try:
        return follower.follow()
    except KeyboardInterrupt:
        follower.say_how_to_continue()
        return EXIT_INTERRUPTED


def exit_code(run: RunStatus) -> int:
    """The exit code of a run without a job or process.

    0: finished; 75: stopped, and can be resumed; that of the failure's kind; else 1.
    """
    if run.state is RunState.FINISHED:
        return 0
    if run.state is RunState.STOPPED:
        return EXIT_STOPPED_RESUMABLE
    attempt = run.attempt
    if attempt is not None and attempt.kind is not None:
        return attempt.kind.exit_code
    is_bad_input = attempt is not None and attempt.ending is Ending.BAD_INPUT
    return EXIT_BAD_INPUT if is_bad_input else EXIT_FAILED


@dataclass(kw_only=True)
class _Follower:
    folder: Path
    output: TextIO
    told: str = ""
    """Key of the last announcement."""
    has_looked: bool = False
    tail: LogTail | None = None
    job: QueuedJob | None = None
    """In the queue at the last look."""

    def follow(self) -> int:
        asked = float("-inf")
        while True:
            if time.monotonic() - asked >= STATE_SECONDS:
                asked = time.monotonic()
                run = self._look()
                if run is not None and run.state not in ACTIVE:
                    self._copy_log()
                    self._write("\n".join(lines_of(run, now=time.time())))
                    return exit_code(run)
            self._copy_log()
            time.sleep(LOG_SECONDS)

    def _look(self) -> RunStatus | None:
        """The state now, its changes announced; None if SLURM, which has the job, is silent."""
        jobs: Sequence[QueuedJob] | None = None
        try:
            jobs = user_jobs()
        except NoAnswerError as error:
            if self.job is not None:
                self._announce(f"SLURM does not answer: {error}", key="no answer")
                return None
        run = read_status(self.folder, jobs=jobs, now=time.time())
        self.job = run.job
        if run.tasks:
            raise UserError(
                f"{shown_folder(self.folder)} has a job of several tasks, each with its own log",
                where="--follow",
                next_step=f"python launch/status.py {shown_folder(self.folder)}",
            )
        self._copy_log()
        self.has_looked = True
        text, key = _state_text(run)
        self._announce(text, key=key)
        return run

    def _announce(self, text: str, *, key: str) -> None:
        """Say it between two lines of the log, once while `key` stays the same."""
        if text and key != self.told:
            self.told = key
            self._write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")

    def _copy_log(self) -> None:
        path = self._log()
        if path is None:
            return
        if self.tail is None or self.tail.path != path:
            is_first = self.tail is None and not self.has_looked
            self.tail = LogTail(path, output=self.output)
            self.tail.position = _start_of_last_lines(path) if is_first else 0
        self.tail.copy()

    def _log(self) -> Path | None:
        """The log of rank 0 of the job in the queue, else of the one that ran last."""
        if self.job is not None:
            job_id = self.job.job_id
            return self.folder / "slurm" / job_id / f"{job_id}_0{LOG_SUFFIX}"
        if self.tail is not None and self.tail.path.parent.parent.name == "slurm":
            return self.tail.path
        return min(newest_tasks(self.folder).logs, default=None)

    def _write(self, text: str) -> None:
        self.output.write(text + "\n")
        self.output.flush()

    def say_how_to_continue(self) -> None:
        if self.job is not None:
            what = f"job {self.job.job_id} continues; scancel {self.job.job_id} ends it"
        else:
            what = "the run continues"
        again = f"python launch/status.py {shown_folder(self.folder)} --follow"
        self._write(f"\n{what}\nfollow it again: {again}")


def _state_text(run: RunStatus) -> tuple[str, str]:
    """What to say of a job's state, without its attempts, which the log announces; and a key,
    which stays the same while only SLURM's estimate of the start changes."""
    job = run.job
    if job is None:
        return "", ""
    key = f"{run.state} {job.job_id} {job.reason} {job.nodes}"
    if run.state in (RunState.QUEUED, RunState.PAUSED):
        return f"{run.state}: {waiting(job, now=time.time())}", key
    if run.state is RunState.RUNNING and job.state == "RUNNING":
        return f"running: job {job.job_id}" + (f" on {job.nodes}" if job.nodes else ""), key
    return "", key


def _start_of_last_lines(path: Path) -> int:
    """Offset in the file; 0 if it does not exist."""
    try:
        content = path.read_bytes()
    except OSError:
        return 0
    position = len(content)
    for _ in range(LAST_LINES + 1):
        position = content.rfind(b"\n", 0, position)
        if position < 0:
            return 0
    return position + 1
