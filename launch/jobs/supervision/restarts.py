"""Decide whether a job starts again after an attempt ended.

Owns: which endings are restarted, the limits of restarts, which nodes are suspected and excluded.
Leaves out: why an attempt failed (`causes`).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from launch.jobs.attempts import FAILURES, Attempt, Ending
from vitscale.config.errors import FailureKind

# Older failures of a node do not count: it may have been repaired.
SUSPECT_HOURS = 24.0
# A node is suspected after this many failures that one of its ranks caused.
FAILURES_OF_A_NODE = 2
# Hardware that computes wrongly or fails: once is enough.
SUSPECT_AT_ONCE = (FailureKind.DEVICE,)
# The same on every node.
NEVER_THE_NODE = (FailureKind.BAD_INPUT, FailureKind.DIVERGED, FailureKind.STORAGE)
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
    lines.append("Submit the same command again when the cause is removed.")
    return "\n".join(lines)


def suspected_nodes(attempts: Sequence[Attempt], *, now: float) -> list[str]:
    """Nodes whose ranks caused failures of the run within `SUSPECT_HOURS`, the worst first."""
    failures: defaultdict[str, int] = defaultdict(int)
    for attempt in attempts:
        is_recent = now - (attempt.ended or now) <= SUSPECT_HOURS * 3600
        if attempt.ending not in FAILURES or attempt.kind in NEVER_THE_NODE or not is_recent:
            continue
        weight = FAILURES_OF_A_NODE if attempt.kind in SUSPECT_AT_ONCE else 1
        for node in set(attempt.failed_nodes):
            failures[node] += weight
    suspected = [node for node, number in failures.items() if number >= FAILURES_OF_A_NODE]
    return sorted(suspected, key=lambda node: (-failures[node], node))


def nodes_to_exclude(
    suspected: Sequence[str], *, usable: Sequence[str], num_nodes: int
) -> list[str]:
    """Those of the suspected nodes without which the job can still start.

    suspected: worst first; usable: nodes that the job could get now, suspected ones among them;
    empty if that is unknown, and none is excluded.
    """
    if not usable:
        return []
    left, excluded = set(usable), []
    for node in suspected:
        # A node that is down cannot be missed.
        if node not in left or len(left) > num_nodes:
            excluded.append(node)
            left.discard(node)
    return excluded
