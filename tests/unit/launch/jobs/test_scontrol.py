"""What a job asks of SLURM, with a `scontrol` that answers as asked for."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.jobs import scontrol
from launch.jobs.scontrol import is_ended_by_slurm, requeue


@pytest.fixture
def answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put a `scontrol` with this shell script first in PATH."""

    def put(script: str) -> None:
        (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "scontrol").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return put


def test_the_signal_that_a_requeue_causes_does_not_end_the_call(answer, tmp_path: Path) -> None:
    answer(f'kill -TERM $$\necho "$@" > {tmp_path}/heard')
    requeue("17_2")
    assert (tmp_path / "heard").read_text() == "requeue 17_2\n"
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_job_that_waits_already_is_requeued(answer) -> None:
    answer("echo 'Job is pending execution for job 17' >&2; exit 1")
    requeue("17")


def test_a_refusal_is_told_in_slurms_own_words(answer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scontrol, "REQUEUE_SECONDS", 0.0)
    monkeypatch.setattr(scontrol, "REQUEUE_PAUSE_S", 0.01)
    answer("echo 'Invalid user id for job 17' >&2; exit 1")
    with pytest.raises(RuntimeError, match="job 17 was not requeued: Invalid user id for job 17"):
        requeue("17")


def test_a_controller_that_is_away_is_asked_again(
    answer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scontrol, "REQUEUE_PAUSE_S", 0.01)
    count = tmp_path / "count"
    answer(f"""
        if [ "$1" = requeue ]; then echo >> {count}; fi
        [ $(wc -l < {count}) -ge 3 ] || {{ echo 'Unable to contact controller' >&2; exit 1; }}
    """)
    requeue("17")
    assert len(count.read_text()) == 3


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
def test_a_job_that_somebody_ends_is_left_alone(answer, shown: str, ended: bool) -> None:
    answer(f"echo '{shown}'")
    assert is_ended_by_slurm("17") is ended
