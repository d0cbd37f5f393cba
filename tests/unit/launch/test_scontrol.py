"""What a job asks of SLURM, with a `scontrol` that answers as asked for."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.scontrol import requeue


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


def test_a_refusal_is_told_in_slurms_own_words(answer) -> None:
    answer("echo 'Invalid user id for job 17' >&2; exit 1")
    with pytest.raises(RuntimeError, match="job 17 was not requeued: Invalid user id for job 17"):
        requeue("17")
