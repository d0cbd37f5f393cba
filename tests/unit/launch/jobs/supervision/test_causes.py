"""Which report names the cause of a failed attempt, and what follows from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.jobs.attempts import Ending, TaskRecord
from launch.jobs.supervision.causes import Outcome, failure_outcome, kind_of_exit_code
from vitscale.config.errors import FailureKind
from vitscale.distributed.failures.events import (
    ATTEMPT_VARIABLE,
    Failure,
    read_failures,
    record_failure,
)

ATTEMPT = "17/1"
# Ranks know their host's name, the task records that of SLURM.
RECORDS = [TaskRecord(rank=0, pid=1, node="n1"), TaskRecord(rank=1, pid=2, node="n2")]
STORAGE = Failure(
    kind=FailureKind.STORAGE, what="no space", rank=1, node="host2.site", step=7, reported_by=1
)
LOST = Failure(
    kind=FailureKind.PEER_LOST, what="connection closed", rank=0, node="host1", reported_by=0
)
SEEN_KILL = Failure(kind=FailureKind.KILLED, what="rank 1 was ended by SIGKILL", rank=1, node="n2")
SEEN_EXIT = Failure(kind=FailureKind.OTHER, what="rank 0 on n1 ended with code 1")


@pytest.fixture
def outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The outcome of these reports of ranks, and what the supervisor saw."""
    monkeypatch.setenv(ATTEMPT_VARIABLE, ATTEMPT)

    def of(*reports: Failure, seen: Failure) -> Outcome:
        for report in reports:
            record_failure(tmp_path, report)
        # A local launcher is no part of the attempt.
        monkeypatch.delenv(ATTEMPT_VARIABLE)
        return failure_outcome(seen, tmp_path, attempt=ATTEMPT, records=RECORDS, nodes=["n1", "n2"])

    return of


def test_the_culprit_is_blamed_and_not_the_one_that_notices(outcome, tmp_path: Path) -> None:
    found = outcome(LOST, STORAGE, seen=SEEN_EXIT)
    assert (found.ending, found.kind, found.exit_code) == (Ending.FAILED, FailureKind.STORAGE, 74)
    assert found.failed_nodes == ("n2",) and found.reason == STORAGE.text
    assert len(read_failures(tmp_path)) == 2


def test_a_kill_that_no_rank_saw_is_recorded(outcome, tmp_path: Path) -> None:
    found = outcome(LOST, seen=SEEN_KILL)
    assert (found.ending, found.failed_nodes) == (Ending.KILLED, ("n2",))
    assert found.reason == SEEN_KILL.what
    recorded = read_failures(tmp_path, attempt=ATTEMPT)[-1]
    assert (recorded.kind, recorded.rank, recorded.reported_by) == (FailureKind.KILLED, 1, None)


def test_the_signal_of_a_kill_that_a_rank_saw_is_kept(outcome, tmp_path: Path) -> None:
    seen_by_rank = Failure(kind=FailureKind.KILLED, what="is gone", rank=1, reported_by=0)
    found = outcome(seen_by_rank, seen=SEEN_KILL)
    assert (found.reason, found.failed_nodes) == (SEEN_KILL.what, ("n2",))
    assert len(read_failures(tmp_path)) == 1


def test_a_rank_that_died_after_its_report_is_believed(outcome) -> None:
    error = Failure(kind=FailureKind.OTHER, what="KeyError: 7", rank=1, reported_by=1)
    found = outcome(error, seen=SEEN_KILL)
    assert (found.kind, found.reason) == (FailureKind.OTHER, error.text)


def test_a_rank_that_only_lost_its_peer_is_not_blamed(outcome) -> None:
    found = outcome(LOST, seen=SEEN_EXIT)
    assert (found.kind, found.failed_nodes) == (FailureKind.PEER_LOST, ())


@pytest.mark.parametrize(
    ("code", "ending"),
    [(2, Ending.BAD_INPUT), (76, Ending.DIVERGED), (74, Ending.FAILED), (1, Ending.FAILED)],
)
def test_without_any_report_the_exit_code_says_the_kind(outcome, code: int, ending: Ending) -> None:
    seen = Failure(kind=kind_of_exit_code(code), what=f"ranks 0-1 ended with code {code}")
    found = outcome(seen=seen)
    assert (found.ending, found.exit_code, found.failed_nodes) == (ending, code, ())


def test_reports_of_another_attempt_do_not_count(outcome, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv(ATTEMPT_VARIABLE, "17/0")
    record_failure(tmp_path, STORAGE)
    monkeypatch.setenv(ATTEMPT_VARIABLE, ATTEMPT)
    assert outcome(seen=SEEN_KILL).kind is FailureKind.KILLED
