"""The journal has each step once after any kill."""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitscale.tracking.journal import Journal, Row, decode, encode, read_rows


def steps_in(path: Path) -> list[int]:
    return [row.step for row, _ in read_rows(path)]


@settings(deadline=None)
@given(num_steps=st.integers(0, 12), resume_step=st.integers(0, 12), torn_bytes=st.integers(0, 60))
def test_resumed_journal_has_each_step_once(
    num_steps: int, resume_step: int, torn_bytes: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "journal.jsonl")
        journal = Journal(path, resume_step=0)
        for step in range(1, num_steps + 1):
            journal.append({"train/loss": step / 7}, step=step)
        journal.close()
        data = path.read_bytes()
        path.write_bytes(data[: max(0, len(data) - torn_bytes)])  # a kill within a line
        before = steps_in(path)

        journal = Journal(path, resume_step=resume_step)
        kept = steps_in(path)
        assert kept == [step for step in before if step <= resume_step]
        for step in range(resume_step + 1, 15):
            journal.append({"train/loss": step / 7}, step=step)
        journal.close()
        assert steps_in(path) == kept + list(range(resume_step + 1, 15))
        assert path.read_bytes().startswith(b"".join(data.splitlines(True)[: len(kept)]))


@settings(deadline=None)
@given(value=st.floats(), step=st.integers(0, 2**40), junk=st.binary(max_size=200))
def test_any_number_survives_as_strict_json_beside_invalid_lines(
    value: float, step: int, junk: bytes
) -> None:
    line = encode(Row(step=step, time=1.5, metrics={"train/loss": value}))

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    json.loads(line, parse_constant=refuse)
    decode(junk)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "journal.jsonl")
        path.write_bytes(junk + b"\n" + line)
        *_, (row, _) = read_rows(path)
        back = row.metrics["train/loss"]
        assert row.step == step and (back == value or (math.isnan(back) and math.isnan(value)))
        Journal(path, resume_step=step).close()
        assert line in path.read_bytes()


def test_all_is_on_the_disk_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, flushed = tmp_path / "journal.jsonl", list[int]()
    monkeypatch.setattr(os, "fsync", lambda fd: flushed.append(os.fstat(fd).st_size))
    journal = Journal(path, resume_step=0)
    journal.append({"train/loss": 1.0}, step=5)
    journal.append({"val/top1": 0.5}, step=5)
    journal.close()
    journal.close()
    assert steps_in(path) == [5, 5] and flushed == [path.stat().st_size]
