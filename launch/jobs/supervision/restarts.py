"""Decide whether a job starts again after an attempt ended.

Owns: which endings are restarted, and the limits of restarts.
Leaves out: why an attempt failed (`causes`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from launch.jobs.attempts import FAILURES, Attempt, Ending

FINAL_TEXTS = {
    Ending.BAD_INPUT: "bad input: a restart would fail in the same way. Correct it and submit "
    "again.",
    Ending.DIVERGED: "the training diverged: a restart would end in the same way. Change the "
    "learning rate or the data, and submit again.",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartLimits:
    """When a job is no longer restarted."""

    max_requeues: int
    """Restarts of one job for any reason."""
    max_fruitless_restarts: int
    """Restarts in a row that failed without a newer checkpoint; 0: a failure is final."""


def refusal(attempts: Sequence[Attempt], *, limits: RestartLimits) -> str | None:
    """Why the job of the last attempt, which has ended, is not to start again; None: it is."""
    last = attempts[-1]
    if last.ending in FINAL_TEXTS:
        return FINAL_TEXTS[last.ending]
    if last.ending in FAILURES:
        fruitless = fruitless_restarts(attempts)
        if len(fruitless) >= limits.max_fruitless_restarts:
            return _crash_loop_text(attempts, fruitless, limits=limits)
    if last.restart >= limits.max_requeues:
        return limit_text(limits)
    return None


def limit_text(limits: RestartLimits) -> str:
    return (
        f"launch.max_requeues={limits.max_requeues} is reached. "
        "Submit the same command again to resume."
    )


def fruitless_restarts(attempts: Sequence[Attempt]) -> list[Attempt]:
    """The latest restarts of the last job that failed in a row without a newer checkpoint.

    Attempts that a signal or SLURM ended neither count nor end the row.
    """
    found: list[Attempt] = []
    newest = attempts[-1].checkpoint_step or 0
    for attempt in reversed(attempts):
        # Its ranks may have saved after its end was recorded: compare with what followed, too.
        is_fruitless = not attempt.steps_gained and newest <= attempt.first_step
        if attempt.job_id != attempts[-1].job_id or not is_fruitless:
            break
        if attempt.ending in FAILURES and attempt.restart:
            found.append(attempt)
    return found[::-1]


def blamed_nodes(attempts: Sequence[Attempt]) -> list[str]:
    """The nodes on which the last two attempts of the last job failed, both of them."""
    pair = [a for a in attempts[-2:] if a.job_id == attempts[-1].job_id and a.ending in FAILURES]
    if len(pair) < 2:
        return []
    return sorted(set(pair[0].failed_nodes) & set(pair[1].failed_nodes))


def _crash_loop_text(
    attempts: Sequence[Attempt], fruitless: Sequence[Attempt], *, limits: RestartLimits
) -> str:
    number = limits.max_fruitless_restarts
    if not fruitless:
        return f"launch.max_fruitless_restarts={number}: a failure is final."
    lines = [f"{len(fruitless)} restarts in a row brought no newer checkpoint:"]
    shown = [a for a in attempts if a.number == fruitless[0].number - 1 and a.ending in FAILURES]
    for attempt in [*shown, *fruitless]:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(attempt.ended))
        lines.append(
            f"  attempt {attempt.number}, ended {at} at step {attempt.last_step}: {attempt.reason}"
        )
    lines.append(f"launch.max_fruitless_restarts={number} is reached.")
    for node in sorted(set.intersection(*(set(attempt.failed_nodes) for attempt in fruitless))):
        lines.append(f"Each of them failed on {node}. To avoid it: launch.exclude='{node}'")
    lines.append("Submit the same command again when the cause is removed.")
    return "\n".join(lines)
