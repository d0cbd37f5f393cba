"""Decide why an attempt failed, from what its ranks recorded and what their supervisor saw.

Owns: the cause among these reports, and the ending, exit code and node that follow from it.
Leaves out: seeing killed ranks and dead nodes (`step`, `launch.jobs.monitor`), and what follows
from an ending (`restarts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launch.jobs.attempts import Ending, TaskRecord
from vitscale.config.errors import EXIT_CODES, FailureKind
from vitscale.distributed.failures.events import Failure, cause, read_failures, record_failure

KIND_OF_EXIT_CODE = {code: kind for kind, code in EXIT_CODES.items()}
ENDINGS = {
    FailureKind.BAD_INPUT: Ending.BAD_INPUT,
    FailureKind.DIVERGED: Ending.DIVERGED,
    FailureKind.KILLED: Ending.KILLED,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How an attempt ended."""

    ending: Ending
    reason: str
    exit_code: int
    kind: FailureKind | None = None
    failed_nodes: tuple[str, ...] = ()


def kind_of_exit_code(code: int) -> FailureKind:
    """The kind that a rank's exit code stands for."""
    return KIND_OF_EXIT_CODE.get(code, FailureKind.OTHER)


def failure_outcome(
    seen: Failure,
    run_folder: Path | str,
    *,
    attempt: str,
    records: Sequence[TaskRecord],
    nodes: Sequence[str],
) -> Outcome:
    """The outcome of a failed attempt.

    seen: what the supervisor saw. It is recorded, and counts, if no rank reported the failure: a
    killed rank cannot, and one that has only lost its peer does not know the cause.
    attempt: `ATTEMPT_VARIABLE` of its tasks; records, nodes: of its tasks.
    """
    reports = read_failures(run_folder, attempt=attempt)
    if not any(_covers(report, seen) for report in reports):
        record_failure(run_folder, replace(seen, attempt=attempt))
        reports.append(seen)
    found = cause(reports)
    assert found is not None
    # Of a killed rank, the supervisor knows the signal; the other ranks only that it is gone.
    is_seen = found is seen or (
        found.kind is seen.kind is FailureKind.KILLED and _same(found, seen)
    )
    return Outcome(
        ending=ENDINGS.get(found.kind, Ending.FAILED),
        reason=seen.what if is_seen else found.text,
        exit_code=found.kind.exit_code,
        kind=found.kind,
        failed_nodes=_nodes_of(seen if is_seen else found, records=records, nodes=nodes),
    )


def _covers(report: Failure, seen: Failure) -> bool:
    """Whether a rank's report makes the supervisor's own superfluous."""
    if seen.kind is not FailureKind.KILLED:
        return True
    by_itself = seen.rank is not None and report.reported_by == seen.rank
    return by_itself or (report.kind is FailureKind.KILLED and _same(report, seen))


def _same(one: Failure, other: Failure) -> bool:
    return one.rank is not None and one.rank == other.rank


def _nodes_of(
    failure: Failure, *, records: Sequence[TaskRecord], nodes: Sequence[str]
) -> tuple[str, ...]:
    """The node of the culprit, by its name in SLURM; a rank knows its host name."""
    if failure.kind is FailureKind.PEER_LOST:
        return ()
    by_rank = {record.rank: record.node for record in records}
    named = failure.node or ""
    candidates = (by_rank.get(-1 if failure.rank is None else failure.rank), named)
    shown = [name for name in (*candidates, named.partition(".")[0]) if name in nodes]
    return tuple(name for name in shown[:1] if name is not None)
