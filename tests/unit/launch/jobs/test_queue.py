"""Jobs of a run folder, read from squeue's answer, and requeueing, with stand-in programs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launch.jobs import queue
from launch.jobs.queue import NoAnswerError, jobs_of, requeue, user_jobs

# As squeue of SLURM 22.05 prints them with SLURM_TIME_FORMAT=%s.
ANSWER = """\
10|10|PENDING|Dependency|N/A||1795371188|/runs/a|b/slurm/.submission_file_c2.sh
9_1|9|RUNNING|None|1795371189|n[1-2]|1795371188|/runs/a|b/slurm/.submission_file_c1.sh
9_0|9|FAILED|NonZeroExitCode|1795371189|n1|1795371188|/runs/a|b/slurm/.submission_file_c1.sh
8|8|RUNNING|None|1795371189|n2|1795371188|/elsewhere/job.sh
7|7|PENDING|Resources|1795374789||1795371188|(null)
slurm_load_jobs warning of some kind
"""


@pytest.fixture
def squeue(tmp_path, monkeypatch):
    """Put a squeue on PATH that prints a text, or fails."""

    def answers(text: str, *, code: int = 0) -> Path:
        program = tmp_path / "bin" / "squeue"
        program.parent.mkdir(exist_ok=True)
        (tmp_path / "answer").write_text(text)
        stream = 2 if code else 1
        program.write_text(
            f'#!/bin/sh\nenv > "{tmp_path}/environment"\ncat "{tmp_path}/answer" >&{stream}\n'
            f"exit {code}\n"
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
        return tmp_path / "environment"

    return answers


def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "slurm").mkdir(parents=True)
    for name in ("c1", "c2"):
        (folder / f"slurm/.submission_file_{name}.sh").symlink_to("gone")
    return folder


def test_a_folder_has_the_jobs_whose_script_it_holds(squeue, tmp_path) -> None:
    squeue(ANSWER)
    folder = run_folder(tmp_path)
    assert [job.job_id for job in jobs_of(folder)] == ["9_1", "10"]
    assert jobs_of(tmp_path / "nowhere") == []


def test_fields_are_typed_and_absent_ones_none(squeue) -> None:
    squeue(ANSWER)
    running, waiting = user_jobs()[3], user_jobs()[4]
    assert (running.submitted_id, running.state, running.reason) == ("9", "RUNNING", None)
    assert (running.start, running.nodes) == (1795371189.0, "n[1-2]")
    assert (waiting.reason, waiting.start, waiting.nodes) == ("Dependency", None, None)


def test_settings_of_squeue_do_not_filter_jobs(squeue, monkeypatch) -> None:
    monkeypatch.setenv("SQUEUE_PARTITION", "other")
    environment = squeue("")
    assert user_jobs() == []
    assert "SQUEUE_PARTITION" not in environment.read_text()
    assert "SLURM_TIME_FORMAT=%s" in environment.read_text()


def test_no_answer_says_why(squeue, monkeypatch) -> None:
    squeue("slurm_load_jobs error: Unable to contact\nslurm controller\n", code=1)
    with pytest.raises(NoAnswerError, match="^slurm_load_jobs error: Unable to contact slurm"):
        user_jobs()
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(NoAnswerError, match="squeue is not on PATH"):
        user_jobs()


@pytest.mark.parametrize(
    ("answers", "message", "waited"),
    [
        (["0"], None, 0),
        (["1 Unable to contact controller", "1 Unable to contact controller", "0"], None, 10),
        # By a preemption.
        (["1 Job is pending execution for job 17"], None, 0),
        (["1 Invalid user id for job 17"] * 99, "Invalid user id for job 17", 65),
    ],
)
def test_requeueing_is_tried_for_a_minute(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answers: list[str],
    message: str | None,
    waited: int,
) -> None:
    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            return self.now

        def sleep(self, seconds: float) -> None:
            self.now += seconds

    left = iter(answers)

    def ask(program: str, *arguments: str) -> str:
        if arguments != ("requeue", "17"):
            return "JobId=17 JobState=RUNNING"
        code, _, text = next(left).partition(" ")
        if code != "0":
            raise NoAnswerError(text)
        return ""

    clock = Clock()
    monkeypatch.setattr(queue, "time", clock)
    monkeypatch.setattr(queue, "ask_slurm", ask)
    assert requeue("17") == message
    assert clock.now == waited
