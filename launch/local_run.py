"""Watch a local job until it ends.

Owns: showing rank 0's log as it grows, noticing a failed task while the others still wait for it,
ending everything, and the exit code of the whole.
Leaves out: starting the tasks (`submission`) and what they run (`job`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from launch.job import TaskRecord, read_task_record, task_record_path
from launch.submission import RESTART_EXIT, Submission
from vitscale.errors import EXIT_BAD_INPUT, EXIT_STOPPED_RESUMABLE

POLL_SECONDS = 0.1
# Time for the other tasks to end by themselves after one failed, before they are ended.
GRACE_SECONDS = 5.0
# The controller gives its tasks one second after SIGINT, then kills them.
CONTROLLER_SECONDS = 5.0
LAST_LINES = 40
NO_FAILURE = (0, EXIT_STOPPED_RESUMABLE, RESTART_EXIT)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How a job ended: its exit code, and the task that failed first, if one did."""

    exit_code: int
    failure: TaskRecord | None


class LogTail:
    """Copies what was added to a log since the last look."""

    def __init__(self, path: Path, *, output: TextIO) -> None:
        self.path, self.output, self.position = path, output, 0

    def copy(self) -> None:
        try:
            with open(self.path, "rb") as file:
                file.seek(self.position)
                added = file.read()
        except FileNotFoundError:
            # The task has not opened it yet.
            return
        self.position += len(added)
        self.output.write(added.decode(errors="replace"))
        self.output.flush()


def follow(submission: Submission, *, output: TextIO) -> Ending:
    """Show rank 0's log until all tasks have ended."""
    controller = submission.controller
    assert controller is not None
    tail = LogTail(submission.log(0), output=output)
    # Remembered from the moment it is seen: ending the other tasks makes failures of them too.
    failure: TaskRecord | None = None
    failed_at: float | None = None
    while controller.poll() is None:
        tail.copy()
        if failure is None and (failure := first_failure(records(submission))) is not None:
            failed_at = time.monotonic()
        waited = 0.0 if failed_at is None else time.monotonic() - failed_at
        if waited > GRACE_SECONDS and not submission.independent:
            controller.send_signal(signal.SIGINT)
            end(submission, wait_first=CONTROLLER_SECONDS)
        time.sleep(POLL_SECONDS)
    end(submission, wait_first=CONTROLLER_SECONDS)
    tail.copy()
    tasks = records(submission)
    failure = failure or first_failure(tasks)
    return Ending(
        exit_code=_exit_code(tasks, failure=failure, num_tasks=submission.num_tasks),
        failure=failure,
    )


def end(submission: Submission, *, wait_first: float) -> None:
    """Make sure that no process of the job is left.

    A second SIGINT would interrupt the controller while it ends its tasks, hence the wait: Ctrl-C
    in a terminal has reached it already.
    """
    controller = submission.controller
    assert controller is not None
    for send in (None, signal.SIGINT, signal.SIGKILL):
        if send is not None:
            controller.send_signal(send)
        try:
            controller.wait(timeout=wait_first)
            break
        except subprocess.TimeoutExpired:
            continue
    for record in records(submission):
        if record.exit_code is None and _is_alive(record.pid):
            os.kill(record.pid, signal.SIGKILL)


def records(submission: Submission) -> list[TaskRecord]:
    """The records of all tasks that have started."""
    found = (
        read_task_record(task_record_path(submission.folder, job_id=submission.job_id, rank=rank))
        for rank in range(submission.num_tasks)
    )
    return [record for record in found if record is not None]


def first_failure(tasks: Sequence[TaskRecord]) -> TaskRecord | None:
    """The task that failed first: it is the cause, later ones mostly lost their partner."""
    failed = [task for task in tasks if _has_failed(task)]
    return min(failed, key=lambda task: task.ended or float("inf"), default=None)


def _has_failed(task: TaskRecord) -> bool:
    if task.exit_code is None:
        # Killed from outside, or crashed: it could not write its end.
        return not _is_alive(task.pid)
    return task.exit_code not in NO_FAILURE


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _exit_code(tasks: Sequence[TaskRecord], *, failure: TaskRecord | None, num_tasks: int) -> int:
    """0, 2 for bad input, 75 for stopped with a checkpoint, 1 for everything else."""
    if failure is not None:
        return EXIT_BAD_INPUT if failure.exit_code == EXIT_BAD_INPUT else 1
    if len(tasks) < num_tasks:
        return 1
    stopped = any(task.exit_code == EXIT_STOPPED_RESUMABLE for task in tasks)
    return EXIT_STOPPED_RESUMABLE if stopped else int(any(task.exit_code for task in tasks))


def failure_report(submission: Submission, ending: Ending) -> str:
    """Which task failed and its last lines; only the name when the terminal has shown them."""
    if ending.failure is None:
        started = {task.rank for task in records(submission)}
        rank = min(set(range(submission.num_tasks)) - started, default=0)
        how = "never started" if rank not in started else "did not finish"
    else:
        rank, code = ending.failure.rank, ending.failure.exit_code
        how = "was killed" if code is None else f"ended with code {code}"
    log = submission.log(rank)
    heading = f"rank {rank} {how}; log: {log}"
    if rank == 0 or not log.exists():
        return heading
    lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
    return "\n".join([heading, *(f"  {line}" for line in lines)])
