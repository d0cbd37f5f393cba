"""The record of a run's attempts: starts, ends, gains, and attempts without an end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.jobs.attempts import (
    Attempt,
    Ending,
    Outcome,
    begin_attempt,
    end_attempt,
    read_attempts,
)
from vitscale.distributed.events import EVENTS_NAME

KILLED = Outcome(ending=Ending.KILLED, reason="rank 1 on n2", exit_code=1, failed_node="n2")


def begin(folder: Path, *, restart: int = 0) -> Attempt:
    return begin_attempt(folder, cluster="slurm", job_id="17", restart=restart, nodes=["n1", "n2"])


def log(folder: Path, step: int) -> None:
    with open(folder / "journal.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "time": 1e9 + step, "train/loss": 1.0}) + "\n")


def test_an_attempt_records_how_it_ended(tmp_path: Path) -> None:
    assert read_attempts(tmp_path) == []
    running = begin(tmp_path)
    assert read_attempts(tmp_path) == [running] and running.ended is None
    checkpoint = tmp_path / "checkpoints/step-00000030"
    checkpoint.mkdir(parents=True)
    log(tmp_path, 37)
    (events,) = (tmp_path / EVENTS_NAME).iterdir()
    before = events.read_bytes()
    ended = end_attempt(running, tmp_path, KILLED)
    assert read_attempts(tmp_path) == [ended]
    assert (ended.checkpoint_step, ended.last_step) == (30, 37)
    assert (ended.ending, ended.failed_node) == (Ending.KILLED, "n2")
    assert ended.ended is not None and ended.ended >= ended.started
    assert events.read_bytes().startswith(before)


def test_the_next_attempt_closes_one_without_an_end(tmp_path: Path) -> None:
    begin(tmp_path)
    log(tmp_path, 5)
    begin(tmp_path, restart=1)
    first, second = read_attempts(tmp_path)
    assert (first.ending, first.last_step) == (Ending.LOST, 5) and first.ended is not None
    assert (second.number, second.restart, second.ended) == (2, 1, None)


@pytest.mark.parametrize(
    "rest", [b'{"event": "attempt", "number": 7', b'{"event": "attempt", "number": 3}\n']
)
def test_a_damaged_line_hides_no_other(tmp_path: Path, rest: bytes) -> None:
    first = begin(tmp_path)
    (events,) = (tmp_path / EVENTS_NAME).iterdir()
    with events.open("ab") as file:
        file.write(rest)
    end_attempt(first, tmp_path, KILLED)
    begin(tmp_path)
    assert [attempt.ending for attempt in read_attempts(tmp_path)] == [Ending.KILLED, None]
