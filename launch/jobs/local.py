"""Watch a local job until it ends.

Owns: showing rank 0's log as it grows, passing a stop on, noticing a failed task while the others
still wait for it, ending everything, and the exit code of the whole.
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

from launch.jobs.job import TaskRecord, read_task_record, task_record_path
from launch.jobs.submission import RESTART_EXIT, Submission
from vitscale.config.errors import EXIT_BAD_INPUT, EXIT_STOPPED_RESUMABLE

POLL_SECONDS = 0.1
# Time for the other tasks to end by themselves after one failed, before they are ended.
GRACE_SECONDS = 5.0
# The controller gives its tasks one second after SIGINT, then kills them.
CONTROLLER_SECONDS = 5.0
# A task that starts after a stop was passed on has missed it, so it is passed on again.
STOP_AGAIN_SECONDS = 2.0
LAST_LINES = 40
NO_FAILURE = (0, EXIT_STOPPED_RESUMABLE, RESTART_EXIT)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How a job ended: its exit code, and the task that failed first, if one did."""

    exit_code: int
    failure: TaskRecord | None


class StopNote:
    """Whether SIGTERM or SIGUSR2 has come. Make it before the tasks start, or one can be missed."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, self._note)

    def _note(self, *_: object) -> None:
        self.asked = True


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


def follow(submission: Submission, *, output: TextIO, stop: StopNote) -> Ending:
    """Show rank 0's log until all tasks have ended; stop them when that is asked for."""
    controller = submission.controller
    assert controller is not None
    tail = LogTail(submission.log(0), output=output)
    # Remembered from the moment it is seen: ending the other tasks makes failures of them too.
    failure: TaskRecord | None = None
    failed_at: float | None = None
    stopped_at: float | None = None
    cut_short = False
    while controller.poll() is None:
        tail.copy()
        now = time.monotonic()
        if stop.asked and (stopped_at is None or now - stopped_at > STOP_AGAIN_SECONDS):
            controller.send_signal(signal.SIGTERM)
            stopped_at = now
        tasks = records(submission)
        failure = failure or first_failure(tasks, stop_asked=stop.asked)
        if failed_at is None and any(map(_has_failed, tasks)):
            failed_at = now
        waited = 0.0 if failed_at is None else now - failed_at
        if waited > GRACE_SECONDS and not submission.independent:
            cut_short = True
            controller.send_signal(signal.SIGINT)
            end(submission, wait_first=CONTROLLER_SECONDS)
        time.sleep(POLL_SECONDS)
    end(submission, wait_first=CONTROLLER_SECONDS)
    tail.copy()
    tasks = records(submission)
    if not cut_short:
        failure = failure or first_failure(tasks, stop_asked=stop.asked)
    return Ending(
        exit_code=_exit_code(
            tasks,
            failure=failure,
            all_ended=len(tasks) == submission.num_tasks
            and all(task.exit_code in NO_FAILURE for task in tasks),
            stop_asked=stop.asked,
        ),
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
    found = (_record(submission, rank) for rank in range(submission.num_tasks))
    return [record for record in found if record is not None]


def _record(submission: Submission, rank: int) -> TaskRecord | None:
    path = task_record_path(submission.folder, job_id=submission.job_id, rank=rank)
    record = read_task_record(path)
    if record is not None and _is_gone(record):
        # Unless it wrote its end between the two looks.
        record = read_task_record(path)
    return record


def first_failure(tasks: Sequence[TaskRecord], *, stop_asked: bool) -> TaskRecord | None:
    """The task that failed first: it is the cause, later ones mostly lost their partner.

    A stop kills the tasks that do not handle it yet: after one, only exit codes are failures.
    """
    failed = [
        task for task in tasks if _has_failed(task) and not (stop_asked and task.exit_code is None)
    ]
    return min(failed, key=lambda task: task.ended or float("inf"), default=None)


def _has_failed(task: TaskRecord) -> bool:
    if task.exit_code is None:
        return _is_gone(task)
    return task.exit_code not in NO_FAILURE


def _is_gone(task: TaskRecord) -> bool:
    """Killed from outside, or crashed: it could not write its end."""
    return task.exit_code is None and not _is_alive(task.pid)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _exit_code(
    tasks: Sequence[TaskRecord], *, failure: TaskRecord | None, all_ended: bool, stop_asked: bool
) -> int:
    """0, 2 for bad input, 75 for stopped where it can go on, 1 for everything else.

    all_ended: whether every task started, and ended by itself without a failure.
    """
    if failure is not None:
        return EXIT_BAD_INPUT if failure.exit_code == EXIT_BAD_INPUT else 1
    if not all_ended:
        return EXIT_STOPPED_RESUMABLE if stop_asked else 1
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
