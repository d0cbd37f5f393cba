"""The record of a run's attempts: starts, ends, gains, and attempts without an end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.jobs.attempts import (
    Attempt,
    Ending,
    begin_attempt,
    end_attempt,
    read_attempts,
)
from vitscale.distributed.failures.events import EVENTS_NAME


def begin(folder: Path, *, restart: int = 0) -> Attempt:
    return begin_attempt(
        folder, cluster="slurm", job_id="17", restart=restart, nodes=["n1", "n2"], num_tasks=2
    )


def commit(folder: Path, step: int) -> None:
    """A checkpoint as far as its name and manifest go."""
    checkpoint = folder / f"checkpoints/step-{step:08d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")


def log(folder: Path, step: int) -> None:
    with open(folder / "journal.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "time": 1e9 + step, "train/loss": 1.0}) + "\n")


def test_no_file_means_no_attempts(tmp_path: Path) -> None:
    assert read_attempts(tmp_path) == []


def test_an_attempt_records_what_it_gained(tmp_path: Path) -> None:
    commit(tmp_path, 10)
    running = begin(tmp_path)
    assert read_attempts(tmp_path) == [running]
    assert running.first_step == 10 and running.ended is None
    commit(tmp_path, 30)
    log(tmp_path, 37)
    ended = end_attempt(
        running,
        tmp_path,
        ending=Ending.KILLED,
        reason="rank 1 on n2 was killed (SIGKILL)",
        exit_code=137,
        failed_nodes=["n2"],
    )
    assert read_attempts(tmp_path) == [ended]
    assert (ended.steps_gained, ended.last_step) == (20, 37)
    assert ended.ending is Ending.KILLED and ended.failed_nodes == ("n2",)
    assert ended.ended is not None and ended.ended >= ended.started


def test_the_next_attempt_closes_one_without_an_end(tmp_path: Path) -> None:
    begin(tmp_path)
    log(tmp_path, 5)
    begin(tmp_path, restart=1)
    first, second = read_attempts(tmp_path)
    assert first.ending is Ending.LOST and first.ended is not None
    assert (first.steps_gained, first.last_step) == (0, 5)
    assert (second.number, second.restart, second.ended) == (2, 1, None)


@pytest.mark.parametrize(
    "rest", [b'{"event": "attempt", "number": 7', b'{"event": "attempt", "number": 3}\n']
)
def test_a_damaged_line_hides_no_other(tmp_path: Path, rest: bytes) -> None:
    first = begin(tmp_path)
    with open(tmp_path / EVENTS_NAME, "ab") as file:
        file.write(rest)
    end_attempt(first, tmp_path, ending=Ending.DONE, reason="", exit_code=0)
    begin(tmp_path)
    assert [attempt.number for attempt in read_attempts(tmp_path)] == [1, 2]
    assert read_attempts(tmp_path)[0].ending is Ending.DONE


def test_the_file_is_only_appended_to(tmp_path: Path) -> None:
    path = tmp_path / EVENTS_NAME
    first = begin(tmp_path)
    before = path.read_bytes()
    end_attempt(first, tmp_path, ending=Ending.STOPPED, reason="time limit", exit_code=75)
    begin(tmp_path)
    assert path.read_bytes().startswith(before)
