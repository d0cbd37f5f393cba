"""What srun's messages say about failed tasks."""

from __future__ import annotations

import signal
import sys

import pytest

from launch.jobs.supervision import step as step_module
from launch.jobs.supervision.step import JobStep


def errors(*lines: str) -> JobStep:
    """A step whose srun has printed these lines."""
    program = f"import sys; sys.stderr.write({chr(10).join([*lines, ''])!r}); sys.exit(9)"
    step = JobStep([sys.executable, "-c", program])
    assert step.wait() == 9
    return step


def test_messages_name_rank_node_and_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_module, "host_names", lambda text: tuple(text.split(",")))
    step = errors(
        "srun: error: n2: task 1: Killed",
        "srun: launch/slurm: _step_signal: Terminating StepId=1.0",
        "srun: error: n1,n2: tasks 0-1: Exited with exit code 75",
        "srun: error: n1: task 0: Segmentation fault (core dumped)",
        "srun: error: n1: task 0: Out Of Memory",
        "srun: error: n1: task 0: User defined signal 2",
        "srun: error: Unable to create step for job 1: Invalid generic resource",
    )
    assert [end.text for end in step.ends] == [
        "rank 1 on n2 was ended by SIGKILL (Killed)",
        "ranks 0-1 on n1, n2 ended with code 75",
        "rank 0 on n1 was ended by SIGSEGV (Segmentation fault (core dumped))",
        "rank 0 on n1 ran out of memory and was killed",
        "rank 0 on n1 was ended by SIGUSR2 (User defined signal 2)",
    ]
    assert [end.exit_code for end in step.ends] == [None, 75, None, None, None]
    assert step.ends[-1].signal is signal.SIGUSR2
    assert step.last_error.startswith("Unable to create step")
