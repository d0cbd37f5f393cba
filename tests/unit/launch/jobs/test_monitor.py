"""How the monitor interprets task records."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.jobs import monitor
from launch.jobs.job import TaskRecord
from launch.jobs.submission import Submission


@pytest.fixture
def ended_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


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
