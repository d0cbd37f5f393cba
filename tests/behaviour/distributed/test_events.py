"""The record of what happened to a run."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from vitscale.config.errors import FailureKind
from vitscale.distributed import events
from vitscale.distributed.events import (
    ATTEMPT_VARIABLE,
    Failure,
    append_event,
    cause,
    read_events,
    read_failures,
    read_start,
    record_failure,
    record_start,
)


def test_failures_are_read_as_written_by_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = Failure(
        kind=FailureKind.STORAGE, what="no space", rank=3, node="n2", step=7, reported_by=3
    )
    for attempt in ("17/0", "17/1"):
        monkeypatch.setenv(ATTEMPT_VARIABLE, attempt)
        record_failure(tmp_path, failure)
    record_start(tmp_path, first_step=0, total_steps=9)
    assert [found.attempt for found in read_failures(tmp_path)] == ["17/0", "17/1"]
    (found,) = read_failures(tmp_path, attempt="17/1")
    assert found == replace(failure, attempt="17/1", time=found.time) and found.time > 1.7e9
    assert found.text == "no space (storage, step 7)"


def test_events_of_all_nodes_are_read_in_order_without_cut_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node, event in (("n2", "one"), ("n1", "two"), ("n2", "three")):
        monkeypatch.setattr(events, "node_name", lambda node=node: node)
        append_event(tmp_path, event, {})
        with open(tmp_path / "events/n2.jsonl", "ab") as file:
            file.write(b'[1]\n{"event": "cut')
        time.sleep(0.002)
    assert [row["event"] for row in read_events(tmp_path)] == ["one", "two", "three"]


def test_the_last_start_counts(tmp_path: Path) -> None:
    assert read_start(tmp_path) is None
    record_start(tmp_path, first_step=0, total_steps=9)
    record_failure(tmp_path, Failure(kind=FailureKind.OTHER, what="an error"))
    record_start(tmp_path, first_step=2, total_steps=12)
    append_event(tmp_path, "started", {"first_step": "none"})
    start = read_start(tmp_path)
    assert start is not None and (start.first_step, start.total_steps) == (2, 12)
    assert start.time > 1.7e9


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (["peer lost", "other", "worker", "storage"], "worker"),
        (["peer lost", "hang", "other"], "other"),
        (["peer lost", "hang"], "hang"),
        (["hang", "killed from outside"], "killed from outside"),
        (["peer lost"], "peer lost"),
    ],
)
def test_the_cause_is_the_report_that_knows_most(kinds: list[str], expected: str) -> None:
    reports = [Failure(kind=FailureKind(kind), what=kind) for kind in kinds]
    found = cause(reports)
    assert found is not None and found.kind == expected


def test_what_a_rank_says_of_itself_is_the_cause() -> None:
    """Others saw only that its process was gone."""
    seen = Failure(kind=FailureKind.KILLED, what="gone", rank=0, reported_by=1)
    own = Failure(kind=FailureKind.OTHER, what="an error", rank=0, reported_by=0)
    assert cause([seen, own]) == own
    assert cause([seen, replace(own, rank=2, reported_by=2)]) == seen
