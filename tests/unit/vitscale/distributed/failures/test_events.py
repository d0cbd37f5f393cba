"""The record of what happened to a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from vitscale.config.errors import FailureKind
from vitscale.distributed.failures.events import (
    ATTEMPT_VARIABLE,
    EVENTS_NAME,
    Failure,
    append_event,
    cause,
    read_events,
    read_failures,
    record_failure,
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
    append_event(tmp_path, "started", {"ranks": 4})
    assert [found.attempt for found in read_failures(tmp_path)] == ["17/0", "17/1"]
    (found,) = read_failures(tmp_path, attempt="17/1")
    assert (found.kind, found.what, found.rank, found.node) == ("storage", "no space", 3, "n2")
    assert (found.step, found.reported_by) == (7, 3) and found.time > 1.7e9
    assert found.text == "no space (storage, step 7)"


def test_cut_and_unknown_lines_are_skipped(tmp_path: Path) -> None:
    append_event(tmp_path, "one", {})
    with open(tmp_path / EVENTS_NAME, "ab") as file:
        file.write(b'[1]\n{"event": "cut')
    append_event(tmp_path, "two", {})
    assert [row["event"] for row in read_events(tmp_path)] == ["one", "two"]


def test_events_of_a_folder_that_cannot_be_written_are_lost(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    append_event(tmp_path / "file", "one", {})
    assert list(read_events(tmp_path / "file")) == []


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


def test_there_is_no_cause_without_reports() -> None:
    assert cause([]) is None
