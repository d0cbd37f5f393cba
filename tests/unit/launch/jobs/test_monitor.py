"""How the monitor interprets task records."""

from __future__ import annotations

import io
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launch.jobs import monitor
from launch.jobs.attempts import TaskRecord, task_record_path, write_record
from launch.jobs.submission import Submission


@pytest.fixture
def ended_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


class EndedController:
    """A controller process that has ended."""

    def poll(self) -> int:
        return 0

    def wait(self, timeout: float) -> int:
        return 0


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ((0, 0), 0),
        ((0, 2), 2),
        ((75, 75), 75),
        ((0, 75), 75),
        ((3, 75), 1),
        ((0, -9), 1),
        ((0,), 1),  # one task never started
    ],
)
def test_the_exit_code_of_a_job_follows_its_tasks(
    tmp_path: Path, codes: tuple[int, ...], expected: int
) -> None:
    submission = Submission(
        job_id="7",
        num_tasks=2,
        folder=tmp_path,
        controller=EndedController(),  # type: ignore[arg-type]  # a stand-in
    )
    for rank, code in enumerate(codes):
        record = TaskRecord(rank=rank, pid=os.getpid(), exit_code=code, ended=float(rank))
        write_record(task_record_path(tmp_path, job_id="7", rank=rank), record)
    submission.log(0).write_text("a line\n")
    output = io.StringIO()
    stop: Any = SimpleNamespace(is_set=False)  # without the signal handlers of StopFlag
    result = monitor.follow(submission, output=output, stop=stop)
    assert result.exit_code == expected
    assert output.getvalue() == "a line\n"


def set_reads(monkeypatch: pytest.MonkeyPatch, *found: TaskRecord) -> None:
    """Let successive reads of the record return these."""
    states: Iterator[TaskRecord] = iter(found)
    monkeypatch.setattr(monitor, "read_task_record", lambda path: next(states))


def test_a_task_ending_between_two_reads_was_not_killed(
    monkeypatch: pytest.MonkeyPatch, ended_pid: int
) -> None:
    running = TaskRecord(rank=0, pid=ended_pid)
    ended = TaskRecord(rank=0, pid=ended_pid, exit_code=0, ended=1.0)
    submission = Submission(job_id="7", num_tasks=1, folder=Path("jobs"))
    set_reads(monkeypatch, running, ended)
    assert monitor.records(submission) == [ended]
    set_reads(monkeypatch, running, running)
    assert monitor.records(submission) == [running]


def test_tasks_killed_by_a_stop_are_not_failures(ended_pid: int) -> None:
    gone = TaskRecord(rank=0, pid=ended_pid)
    failed = TaskRecord(rank=1, pid=ended_pid, exit_code=3, ended=1.0)
    assert monitor.first_failure([gone], stopping=False) == gone
    assert monitor.first_failure([gone], stopping=True) is None
    assert monitor.first_failure([gone, failed], stopping=True) == failed


def test_the_task_that_failed_first_is_named() -> None:
    failed = [
        TaskRecord(rank=rank, pid=os.getpid(), exit_code=1, ended=ended)
        for rank, ended in enumerate((9.0, 7.0, 8.0))
    ]
    first = monitor.first_failure(failed, stopping=False)
    assert first is not None and first.rank == 1


class RunningController(EndedController):
    """A controller process that ends after some polls, whatever it is sent."""

    def __init__(self) -> None:
        self.states = iter([None] * 5)
        self.signals: list[int] = []

    def poll(self) -> int | None:  # type: ignore[override]  # None: it still runs
        return next(self.states, 0)

    def send_signal(self, number: int) -> None:
        self.signals.append(number)


@pytest.mark.parametrize("independent", [False, True])
def test_only_independent_tasks_outlive_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, independent: bool
) -> None:
    clock = itertools.count(0.0, 3.0)
    fake = SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda seconds: None)
    monkeypatch.setattr(monitor, "time", fake)
    controller: Any = RunningController()
    submission = Submission(
        job_id="7", num_tasks=2, folder=tmp_path, controller=controller, independent=independent
    )
    for rank in range(2):
        record = TaskRecord(rank=rank, pid=os.getpid(), exit_code=rank, ended=1.0)
        write_record(task_record_path(tmp_path, job_id="7", rank=rank), record)
    stop: Any = SimpleNamespace(is_set=False)
    result = monitor.follow(submission, output=io.StringIO(), stop=stop)
    assert result.exit_code == 1 and result.failure is not None and result.failure.rank == 1
    assert set(controller.signals) == (set() if independent else {signal.SIGINT})
