"""Dead, hung and lost ranks in simulated worlds, from their heartbeats alone; no clock."""

from __future__ import annotations

from typing import Any

import pytest

from vitscale.config.errors import FailureKind
from vitscale.distributed.failures import heartbeat
from vitscale.distributed.failures.events import Failure
from vitscale.distributed.failures.heartbeat_table import (
    ENDED,
    LOST,
    REPORTS,
    RUNNING,
    Beat,
    HeartbeatTable,
    Silence,
    failure_to_json,
)

PERIOD_S = heartbeat.LONGEST_PERIOD_S
LATE_S = 420.0


def table(num_ranks: int) -> HeartbeatTable:
    dead_s = heartbeat.LONGEST_SILENCE_S
    return HeartbeatTable(num_ranks, period_s=PERIOD_S, dead_s=dead_s, late_s=LATE_S)


def beat(rank: int, number: int, *, reached: int = 0, begun: int = 0, **changes: str) -> Beat:
    values = {"state": RUNNING, "doing": "x", **changes}
    return Beat(number, reached, begun, node=f"n{rank // 8}", **values)


def test_a_suspended_job_counts_two_periods_of_silence() -> None:
    silence, moments = Silence(5.0), (100.0, 105.0, 3705.0, 3710.0, 3715.0)
    pairs = zip((1, 1, 1, 2, 2), moments, strict=True)
    found = [silence.seconds(number, now=now) for number, now in pairs]
    assert found == [0.0, 5.0, 15.0, 0.0, 5.0]


@pytest.mark.parametrize("num_ranks", [16, 1024])
def test_a_node_without_power_is_named_within_60_s(num_ranks: int) -> None:
    """No connection is closed; the last heartbeats of its eight ranks arrive at 100 s."""
    watch, named = table(num_ranks), None
    for period in range(int(90 / PERIOD_S), 100):
        now = period * PERIOD_S
        last = {rank: min(period, int(100 / PERIOD_S)) for rank in range(8, 16)}
        beats = [beat(rank, last.get(rank, period)) for rank in range(num_ranks)]
        named = watch.problem(beats, now=now)
        if named:
            break
    # The other ranks read it a period later.
    assert named is not None and 100 < now <= 160 - PERIOD_S
    assert named.what.startswith("all of n1 (rank 8 to 15) has sent no heartbeat for 45 s")
    assert (named.kind, named.rank, named.node) == ("killed from outside", 8, "n1")


def test_the_rank_whose_device_hangs_is_named() -> None:
    """All loops run; the device of rank 3 has not reached what the devices of the others have."""
    watch, named = table(8), None
    for period in range(1, 1000):
        beats = [beat(rank, period, reached=41, doing="updating the weights") for rank in range(8)]
        beats[3] = beat(3, period, reached=40, doing="running the backward pass")
        named = watch.problem(beats, now=period * PERIOD_S)
        if named:
            break
    assert named is not None and (named.kind, named.rank, named.node) == ("hang", 3, "n0")
    what = "rank 3 on n0 has kept the others waiting for 420 s (running the backward pass)"
    assert named.what == what


@pytest.mark.parametrize("others", [{"begun": 3}, {"begun": 2, "state": ENDED}])
def test_a_rank_that_hangs_between_marks_is_named(others: dict[str, Any]) -> None:
    """The others wait for it in a collective that it has not begun, or have ended."""
    watch, named = table(4), None
    for period in range(1, 1000):
        beats = [beat(rank, period, reached=7, **others) for rank in range(4)]
        beats[2] = beat(2, period, reached=7, begun=2)
        named = watch.problem(beats, now=period * PERIOD_S)
        if named:
            break
    assert named is not None and (named.kind, named.rank) == ("hang", 2)


def test_a_lost_connection_names_the_silent_rank_early() -> None:
    watch, named = table(8), None
    for period in range(1, 100):
        beats = [beat(rank, period, state=LOST if rank == 2 else RUNNING) for rank in range(8)]
        beats[5] = beat(5, min(period, 10))
        named = watch.problem(beats, now=period * PERIOD_S)
        if named:
            break
    assert named is not None and named.rank == 5 and period == 13
    assert named.what == "rank 5 on n0 sends no heartbeat any more"


def test_a_rank_that_ended_is_named_only_to_those_who_miss_it() -> None:
    watch = table(2)
    ended = beat(1, 9, state=ENDED)
    for period in range(1, 100):
        assert watch.problem([beat(0, period), ended], now=period * PERIOD_S) is None
    lost = [beat(0, 101, state=LOST), ended]
    named = watch.problem(lost, now=303.0)
    assert named is not None and named.rank == 1


def test_a_report_ends_the_run_at_once_and_names_its_culprit() -> None:
    """Rank 1 reports rank 2, which it saw die; that rank 5 is silent, too, is not the cause."""
    failure = Failure(kind=FailureKind.KILLED, what="gone", rank=2, node="n0", reported_by=1)
    beats = [beat(rank, 1) for rank in range(6)]
    beats[1] = beat(1, 1, state=REPORTS, doing=failure_to_json(failure))
    assert table(6).problem(beats, now=1.0) == failure


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    watch, named = table(4), None
    for period in range(1, 2 + int(LATE_S / PERIOD_S)):
        beats = [
            beat(rank, 1 if rank == 0 else period, reached=reached)
            for rank, reached in enumerate((3, 9, 5, 9))
        ]
        beats[0] = beats[0]._replace(state=ENDED)
        named = watch.problem(beats, now=period * PERIOD_S)
    assert named is not None and (named.kind, named.rank) == (FailureKind.HANG, 2)
