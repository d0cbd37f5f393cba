"""Which endings are restarted, and how often."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launch.jobs.attempts import Attempt, Ending
from launch.jobs.supervision.restarts import (
    RestartLimits,
    blamed_nodes,
    fruitless_restarts,
    refusal,
)

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
        ([KILLED, (Ending.FAILED, 5), KILLED], True),
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
    assert "launch.exclude='n2'" in text


def test_without_fruitless_restarts_a_failure_is_final() -> None:
    limits = RestartLimits(max_requeues=9, max_fruitless_restarts=0)
    assert "is final" in (refusal(attempts((Ending.KILLED, 5)), limits=limits) or "")
    assert refusal(attempts(STOPPED), limits=limits) is None


def test_a_checkpoint_after_the_recorded_end_counts_as_progress() -> None:
    """Ranks outlive a killed supervisor, and save when SLURM ends them."""
    row = attempts(KILLED, KILLED, KILLED, KILLED)
    assert len(fruitless_restarts(row)) == 3
    late = [*row[:3], replace(row[3], first_step=5, checkpoint_step=5)]
    assert fruitless_restarts(late) == late[3:]


@pytest.mark.parametrize("ending", [Ending.BAD_INPUT, Ending.DIVERGED])
def test_what_would_end_in_the_same_way_is_final(ending: Ending) -> None:
    assert "again" in (refusal(attempts((ending, 5)), limits=LIMITS) or "")


def test_two_failures_in_a_row_blame_a_node() -> None:
    assert blamed_nodes(attempts(KILLED)) == []
    assert blamed_nodes(attempts(KILLED, KILLED)) == ["n2"]
    assert blamed_nodes(attempts(KILLED, STOPPED, KILLED)) == []
    assert blamed_nodes([*attempts(KILLED), *attempts(KILLED, job_id="18", first=2)]) == []
    first, second = attempts(KILLED, (Ending.FAILED, 5))
    assert blamed_nodes([first, second]) == ["n2"]  # progress does not acquit it
    assert blamed_nodes([first, replace(second, failed_nodes=("n1",))]) == []
