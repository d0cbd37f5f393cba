"""Monitor a local job until it ends.

Owns: streaming rank 0's log, forwarding a stop signal, detecting a failed task while others wait
for it, ending all processes, and the job's exit code.
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

from launch.jobs.attempts import TaskRecord, read_task_record, task_record_path
from launch.jobs.submission import RESTART_EXIT, Submission
from vitscale.config.errors import EXIT_CODES, EXIT_FAILED, EXIT_STOPPED_RESUMABLE
from vitscale.distributed.processes import is_alive

POLL_SECONDS = 0.1
# After one task failed, the others have this long to end before they are ended.
GRACE_SECONDS = 5.0
# The controller kills its tasks one second after SIGINT.
CONTROLLER_SECONDS = 5.0
# A task that starts after the stop signal was forwarded misses it, so it is sent again.
RESEND_STOP_SECONDS = 2.0
LAST_LINES = 40
NO_FAILURE = (0, EXIT_STOPPED_RESUMABLE, RESTART_EXIT)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobResult:
    """Exit code of a job, and the task that failed first, if any."""

    exit_code: int
    failure: TaskRecord | None


class StopFlag:
    """Set by SIGTERM and SIGUSR2. Create it before the tasks start, or a signal can be missed."""

    def __init__(self) -> None:
        self.is_set = False
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, self._set)

    def _set(self, *_: object) -> None:
        self.is_set = True


class LogTail:
    """Copies new content of a log on every call of `copy`."""

    def __init__(self, path: Path, *, output: TextIO) -> None:
        self.path, self.output, self.position = path, output, 0

    def copy(self) -> None:
        try:
            with open(self.path, "rb") as file:
                file.seek(self.position)
                added = file.read()
        except FileNotFoundError:
            return  # the task has not opened it yet
        self.position += len(added)
        self.output.write(added.decode(errors="replace"))
        self.output.flush()


def follow(submission: Submission, *, output: TextIO, stop: StopFlag) -> JobResult:
    """Stream rank 0's log until all tasks have ended. Forward a stop signal to them."""
    controller = submission.controller
    assert controller is not None
    tail = LogTail(submission.log(0), output=output)
    # Recorded when first seen: ending the other tasks makes failures of them too.
    failure: TaskRecord | None = None
    failed_at: float | None = None
    stopped_at: float | None = None
    cut_short = False
    while controller.poll() is None:
        tail.copy()
        now = time.monotonic()
        if stop.is_set and (stopped_at is None or now - stopped_at > RESEND_STOP_SECONDS):
            controller.send_signal(signal.SIGTERM)
            stopped_at = now
        tasks = records(submission)
        failure = failure or first_failure(tasks, stopping=stop.is_set)
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
        failure = failure or first_failure(tasks, stopping=stop.is_set)
    return JobResult(
        exit_code=_exit_code(
            tasks,
            failure=failure,
            all_ended=len(tasks) == submission.num_tasks
            and all(task.exit_code in NO_FAILURE for task in tasks),
            stopping=stop.is_set,
        ),
        failure=failure,
    )


def end(submission: Submission, *, wait_first: float) -> None:
    """Leave no process of the job running.

    Waits first: Ctrl-C in a terminal has already reached the controller, and a second SIGINT would
    interrupt it while it ends its tasks.
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
        if record.exit_code is None and is_alive(record.pid):
            os.kill(record.pid, signal.SIGKILL)


def records(submission: Submission) -> list[TaskRecord]:
    """The records of all tasks that have started."""
    found = (_record(submission, rank) for rank in range(submission.num_tasks))
    return [record for record in found if record is not None]


def _record(submission: Submission, rank: int) -> TaskRecord | None:
    path = task_record_path(submission.folder, job_id=submission.job_id, rank=rank)
    record = read_task_record(path)
    if record is not None and _was_killed(record):
        # It may have written its end after the first read.
        record = read_task_record(path)
    return record


def first_failure(tasks: Sequence[TaskRecord], *, stopping: bool) -> TaskRecord | None:
    """The task that failed first: the likely cause of later failures.

    A stop signal kills tasks that do not handle it yet, so while stopping only exit codes count as
    failures.
    """
    failed = [
        task for task in tasks if _has_failed(task) and not (stopping and task.exit_code is None)
    ]
    return min(failed, key=lambda task: task.ended or float("inf"), default=None)


def _has_failed(task: TaskRecord) -> bool:
    if task.exit_code is None:
        return _was_killed(task)
    return task.exit_code not in NO_FAILURE


def _was_killed(task: TaskRecord) -> bool:
    """Killed or crashed: the process ended without writing its exit code."""
    return task.exit_code is None and not is_alive(task.pid)


def _exit_code(
    tasks: Sequence[TaskRecord], *, failure: TaskRecord | None, all_ended: bool, stopping: bool
) -> int:
    """0: done; 75: stopped, resumable; that of the failure if it stands for a kind; else 1.

    all_ended: whether every task started and ended without a failure.
    """
    if failure is not None:
        is_kind = failure.exit_code in EXIT_CODES.values()
        return failure.exit_code if failure.exit_code and is_kind else EXIT_FAILED
    if not all_ended:
        return EXIT_STOPPED_RESUMABLE if stopping else 1
    stopped = any(task.exit_code == EXIT_STOPPED_RESUMABLE for task in tasks)
    return EXIT_STOPPED_RESUMABLE if stopped else int(any(task.exit_code for task in tasks))


def failure_report(submission: Submission, result: JobResult, *, streamed: bool = True) -> str:
    """The failed task and its last log lines, which are left out for rank 0 if `streamed`."""
    if result.failure is None:
        started = {task.rank for task in records(submission)}
        rank = min(set(range(submission.num_tasks)) - started, default=0)
        how = "never started" if rank not in started else "did not finish"
    else:
        rank, code = result.failure.rank, result.failure.exit_code
        how = "was killed" if code is None else f"ended with code {code}"
    log = submission.log(rank)
    heading = f"rank {rank} {how}; log: {log}"
    if (rank == 0 and streamed) or not log.exists():
        return heading
    lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
    return "\n".join([heading, *(f"  {line}" for line in lines)])
