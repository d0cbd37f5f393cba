"""What the records of local tasks mean."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.jobs import local
from launch.jobs.job import TaskRecord
from launch.jobs.submission import Submission


@pytest.fixture
def ended_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def looks(monkeypatch: pytest.MonkeyPatch, *found: TaskRecord) -> None:
    """Let each look at the record find the next of these."""
    states: Iterator[TaskRecord] = iter(found)
    monkeypatch.setattr(local, "read_task_record", lambda path: next(states))


def test_a_task_that_ends_between_two_looks_was_not_killed(
    monkeypatch: pytest.MonkeyPatch, ended_pid: int
) -> None:
    running = TaskRecord(rank=0, pid=ended_pid)
    ended = TaskRecord(rank=0, pid=ended_pid, exit_code=0, ended=1.0)
    submission = Submission(job_id="7", num_tasks=1, folder=Path("jobs"))
    looks(monkeypatch, running, ended)
    assert local.records(submission) == [ended]
    looks(monkeypatch, running, running)
    assert local.records(submission) == [running]


def test_tasks_killed_by_a_stop_are_no_failures(ended_pid: int) -> None:
    gone = TaskRecord(rank=0, pid=ended_pid)
    failed = TaskRecord(rank=1, pid=ended_pid, exit_code=3, ended=1.0)
    assert local.first_failure([gone], stop_asked=False) == gone
    assert local.first_failure([gone], stop_asked=True) is None
    assert local.first_failure([gone, failed], stop_asked=True) == failed
