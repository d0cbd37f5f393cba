"""Which endings are restarted, how often, and which nodes are suspected."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launch.jobs.attempts import Attempt, Ending
from launch.jobs.supervision.restarts import (
    RestartLimits,
    fruitless_restarts,
    nodes_to_exclude,
    refusal,
    suspected_nodes,
)
from vitscale.config.errors import FailureKind

NOW = 1_700_000_000.0

LIMITS = RestartLimits(max_requeues=9, max_fruitless_restarts=2)


def attempts(*endings: tuple[Ending, int], job_id: str = "17", first: int = 1) -> list[Attempt]:
    """One attempt for each (ending, steps gained)."""
    found, step = [], 0
    for restart, (ending, gained) in enumerate(endings):
        found.append(
            Attempt(
                number=first + restart,
                cluster="slurm",
                job_id=job_id,
                restart=restart,
                nodes=("n1", "n2"),
                num_tasks=2,
                started=0.0,
                ended=1.0,
                first_step=step,
                ending=ending,
                reason=f"reason {first + restart}",
                failed_nodes=("n2",),
                checkpoint_step=step + gained,
                last_step=step + gained,
            )
        )
        step += gained
    return found


KILLED, STOPPED = (Ending.KILLED, 0), (Ending.STOPPED, 0)


@pytest.mark.parametrize(
    ("row", "restarted"),
    [
        ([KILLED], True),
        ([KILLED, KILLED], True),
        ([KILLED, KILLED, KILLED], False),
        ([KILLED, KILLED, (Ending.FAILED, 5)], True),
        ([KILLED, (Ending.NODE_FAILED, 5), KILLED], True),
        # A preemption neither counts nor ends the row.
        ([KILLED, KILLED, STOPPED, KILLED], False),
        ([STOPPED] * 9, True),
        ([STOPPED] * 10, False),
        ([(Ending.FAILED, 5)] * 10, False),
        ([(Ending.ENDED_BY_SLURM, 0)] * 4, True),
    ],
)
def test_restarts_have_limits(row: list[tuple[Ending, int]], restarted: bool) -> None:
    assert (refusal(attempts(*row), limits=LIMITS) is None) is restarted


def test_a_new_job_starts_counting_anew() -> None:
    before = attempts(KILLED, KILLED, KILLED)
    now = attempts(KILLED, KILLED, job_id="18", first=4)
    assert refusal(before, limits=LIMITS) is not None
    assert refusal(before + now, limits=LIMITS) is None


def test_a_crash_loop_names_the_reason_of_each() -> None:
    text = refusal(attempts((Ending.KILLED, 5), KILLED, KILLED), limits=LIMITS)
    assert text is not None and "2 restarts in a row" in text
    assert [f"reason {number}" in text for number in (1, 2, 3)] == [True, True, True]


def test_without_fruitless_restarts_a_failure_is_final() -> None:
    limits = RestartLimits(max_requeues=9, max_fruitless_restarts=0)
    assert "is final" in (refusal(attempts((Ending.KILLED, 5)), limits=limits) or "")
    assert refusal(attempts(STOPPED), limits=limits) is None


def failures(*rows: tuple[FailureKind | None, float, str]) -> list[Attempt]:
    """One failed attempt for each (kind, hours ago, node of the culprit)."""
    return [
        replace(
            attempts(KILLED)[0],
            number=number,
            kind=kind,
            ended=NOW - hours * 3600,
            failed_nodes=(node,),
            ending=Ending.DIVERGED if kind is FailureKind.DIVERGED else Ending.FAILED,
        )
        for number, (kind, hours, node) in enumerate(rows, start=1)
    ]


@pytest.mark.parametrize(
    ("rows", "suspected"),
    [
        ([(FailureKind.KILLED, 1, "n2")], []),
        ([(FailureKind.KILLED, 1, "n2"), (FailureKind.HANG, 1, "n2")], ["n2"]),
        # Of an older version, which recorded no kind.
        ([(None, 1, "n2"), (None, 1, "n2")], ["n2"]),
        ([(FailureKind.KILLED, 1, "n2"), (FailureKind.KILLED, 1, "n1")], []),
        ([(FailureKind.DEVICE, 1, "n2")], ["n2"]),
        ([(FailureKind.STORAGE, 1, "n2")] * 3, []),
        ([(FailureKind.DIVERGED, 1, "n2")] * 3, []),
        # Suspicion expires.
        ([(FailureKind.KILLED, 23, "n2"), (FailureKind.KILLED, 25, "n2")], []),
        ([(FailureKind.DEVICE, 25, "n2")], []),
        # The worst first.
        ([(FailureKind.HANG, 1, "n2")] * 3 + [(FailureKind.DEVICE, 1, "n1")], ["n2", "n1"]),
    ],
)
def test_nodes_are_suspected_by_what_failed_and_when(
    rows: list[tuple[FailureKind | None, float, str]], suspected: list[str]
) -> None:
    assert suspected_nodes(failures(*rows), now=NOW) == suspected


@pytest.mark.parametrize(
    ("suspected", "usable", "excluded"),
    [
        (["n2"], ["n1", "n2", "n3"], ["n2"]),
        (["n2", "n1"], ["n1", "n2", "n3"], ["n2"]),
        (["n2"], ["n1", "n2"], []),
        # A node that is down cannot be missed.
        (["n2"], ["n1", "n3"], ["n2"]),
        # SLURM does not say.
        (["n2"], [], []),
    ],
)
def test_enough_nodes_are_left_to_start(
    suspected: list[str], usable: list[str], excluded: list[str]
) -> None:
    assert nodes_to_exclude(suspected, usable=usable, num_nodes=2) == excluded


def test_a_checkpoint_after_the_recorded_end_counts_as_progress() -> None:
    """Ranks outlive a killed supervisor, and save when SLURM ends them."""
    row = attempts(KILLED, KILLED, KILLED, KILLED)
    assert len(fruitless_restarts(row)) == 3
    late = [*row[:3], replace(row[3], first_step=5, checkpoint_step=5)]
    assert fruitless_restarts(late) == late[3:]


@pytest.mark.parametrize("ending", [Ending.BAD_INPUT, Ending.DIVERGED])
def test_what_would_end_in_the_same_way_is_final(ending: Ending) -> None:
    assert "again" in (refusal(attempts((ending, 5)), limits=LIMITS) or "")
