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
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A squeue on PATH that prints ANSWER, and its environment into a file next to it."""
    program = tmp_path / "bin/squeue"
    program.parent.mkdir()
    (program.parent / "answer").write_text(ANSWER)
    program.write_text('#!/bin/sh\nenv > "$0.env"\ncat "${0%squeue}answer"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return program


def test_a_folder_has_the_jobs_whose_script_it_holds(squeue: Path, tmp_path: Path) -> None:
    (tmp_path / "run/slurm").mkdir(parents=True)
    for name in ("c1", "c2"):
        (tmp_path / f"run/slurm/.submission_file_{name}.sh").symlink_to("gone")
    assert [job.job_id for job in jobs_of(tmp_path / "run")] == ["9_1", "10"]
    assert jobs_of(tmp_path / "nowhere") == []


def test_settings_of_squeue_do_not_filter_jobs(squeue: Path, monkeypatch) -> None:
    monkeypatch.setenv("SQUEUE_PARTITION", "other")
    assert len(user_jobs()) == 5
    environment = Path(f"{squeue}.env").read_text()
    assert "SQUEUE_PARTITION" not in environment and "SLURM_TIME_FORMAT=%s" in environment


def test_no_answer_says_why(squeue: Path, monkeypatch) -> None:
    squeue.write_text("#!/bin/sh\nprintf 'error: no\\ncontroller\\n' >&2\nexit 1\n")
    with pytest.raises(NoAnswerError, match="^error: no controller"):
        user_jobs()
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(NoAnswerError, match="squeue is not on PATH"):
        user_jobs()


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([""], None),
        (["Unable to contact controller", "Unable to contact controller", ""], None),
        (["Job is pending execution for job 17"], None),  # by a preemption
        (["Invalid user id for job 17"] * 999, "Invalid user id for job 17"),
    ],
)
def test_requeueing_is_tried_for_a_while(
    monkeypatch: pytest.MonkeyPatch, answers: list[str], message: str | None
) -> None:
    left = iter(answers)

    def ask(program: str, *arguments: str) -> str:
        if arguments == ("requeue", "17") and (text := next(left)):
            raise NoAnswerError(text)
        return "JobId=17 JobState=RUNNING"

    monkeypatch.setattr(queue, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(queue, "REQUEUE_SECONDS", 0.2)
    monkeypatch.setattr(queue, "ask_slurm", ask)
    assert requeue("17") == message
    assert (next(left, None) is None) == (message is None)
