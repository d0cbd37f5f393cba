"""Requeueing and job state, with a stand-in `scontrol` and clock."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.jobs import scontrol
from launch.jobs.scontrol import is_ended_by_slurm, requeue


class Clock:
    """A stand-in for `time` whose sleeps pass at once."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(scontrol, "time", clock)
    return clock


@pytest.fixture
def answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put a `scontrol` with this shell script first in PATH."""

    def put(script: str) -> None:
        (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "scontrol").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return put


def test_sigterm_during_a_requeue_does_not_end_the_call(answer, tmp_path: Path) -> None:
    answer(f'kill -TERM $$\necho "$@" > {tmp_path}/heard')
    requeue("17_2")
    assert (tmp_path / "heard").read_text() == "requeue 17_2\n"
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_job_already_in_the_queue_is_requeued(answer) -> None:
    answer("echo 'Job is pending execution for job 17' >&2; exit 1")
    requeue("17")


def test_a_refusal_is_final_after_a_minute(answer, clock: Clock) -> None:
    answer("echo 'Invalid user id for job 17' >&2; exit 1")
    with pytest.raises(RuntimeError, match="job 17 was not requeued: Invalid user id for job 17"):
        requeue("17")
    assert 60 <= clock.now <= 70


def test_an_unreachable_controller_is_asked_again(answer, tmp_path: Path, clock: Clock) -> None:
    count = tmp_path / "count"
    answer(f"""
        if [ "$1" = requeue ]; then echo >> {count}; fi
        [ $(wc -l < {count}) -ge 3 ] || {{ echo 'Unable to contact controller' >&2; exit 1; }}
    """)
    requeue("17")
    assert len(count.read_text()) == 3
    assert clock.now == 10


@pytest.mark.parametrize(
    ("shown", "ended"),
    [
        ("JobId=17 JobState=COMPLETING Reason=None", True),
        ("JobId=17 JobState=CANCELLED Reason=None", True),
        ("JobId=17 JobState=COMPLETING Reason=TimeLimit", False),
        ("JobId=17 JobState=RUNNING Reason=None", False),
        ("", False),
    ],
)
def test_a_cancelled_or_requeued_job_is_ended_by_slurm(answer, shown: str, ended: bool) -> None:
    answer(f"echo '{shown}'")
    assert is_ended_by_slurm("17") is ended
