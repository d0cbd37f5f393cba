"""Record the attempts of a run: when each started and ended, why, and what it gained.

Owns: the attempts among the events of a run folder, and what counts as the cause of a failure.
Leaves out: the file of the events (`vitscale.distributed.events`), and deciding whether
to start again (`requeue_decision`).

Each attempt is two events, one at its start and one at its end. An attempt whose machine died has
no second one: the next attempt appends it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from vitscale.checkpoint.folders import step_folders, step_of
from vitscale.config.errors import EXIT_CODES, FailureKind, print_note
from vitscale.distributed.atomic_files import or_warn, retried
from vitscale.distributed.events import (
    EVENTS_NAME,
    Failure,
    append_event,
    cause,
    read_as,
    read_failures,
    read_start,
    record_failure,
)
from vitscale.tracking.journal import JOURNAL_NAME, Row, decode

# Name of the event.
ATTEMPT = "attempt"
# These are thousands of lines of a journal, with the last evaluation among them.
TAIL_BYTES = 1 << 18


class Ending(StrEnum):
    DONE = "done"
    STOPPED = "stopped"
    """Stopped by a signal (time limit, preemption, pause), with a checkpoint or before step 1."""
    ENDED_BY_SLURM = "ended by SLURM"
    """Cancelled, requeued or preempted without time for a checkpoint."""
    FAILED = "failed"
    LOST = "lost"
    """Without a record of its end."""


KIND_OF_EXIT_CODE = {code: kind for kind, code in EXIT_CODES.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    ending: Ending | None = None
    """None while it runs."""
    reason: str = ""
    """One sentence that names rank, node and signal where they are known."""
    exit_code: int = 0
    kind: FailureKind | None = None
    """Kind of the failure, if it failed."""
    failed_rank: int | None = None
    """The rank that caused the failure."""
    failed_node: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt(Outcome):
    """One start of a run. Times are unix seconds; steps count from 1, 0 is before the first."""

    number: int
    """1 for the first attempt of the run."""
    cluster: str
    """slurm or local."""
    job_id: str
    restart: int
    """How often this job had been requeued: 0 for its first start."""
    nodes: tuple[str, ...] = ()
    started: float
    pid: int | None = None
    """Process of the launcher, if it is local."""
    ended: float | None = None
    """None while it runs."""
    checkpoint_step: int = 0
    """Step of the newest checkpoint at the end."""
    last_step: int = 0
    """Last step in the journal at the end."""
    is_requeued: bool = False
    """Whether its batch script has put the job back into the queue."""


READ_ATTEMPT = TypeAdapter(Attempt)


def read_attempts(run_folder: Path | str) -> list[Attempt]:
    """All attempts, oldest first; empty without events. Unreadable ones are skipped."""
    attempts: dict[int, Attempt] = {}
    for attempt in read_as(READ_ATTEMPT, ATTEMPT, run_folder):
        known = attempts.setdefault(attempt.number, attempt)
        # An end counts even before its start, since a clock may have been set back.
        if known.ended is None or attempt.ended is not None:
            attempts[attempt.number] = attempt
    return [attempts[number] for number in sorted(attempts)]


def begin_attempt(
    run_folder: Path | str,
    *,
    cluster: str,
    job_id: str,
    restart: int = 0,
    nodes: Sequence[str] = (),
) -> Attempt:
    """Record the start of an attempt, now. Closes an attempt without an end."""
    folder = Path(run_folder)
    number = 1
    if earlier := read_attempts(folder):
        number += earlier[-1].number
        if earlier[-1].ended is None:
            reason = "no record of its end: SLURM ended it at once, or its node died"
            _close(earlier[-1], folder, ending=Ending.LOST, reason=reason)

    # A process of a job may be on another machine, where the number means nothing.
    pid = None
    if cluster == "local":
        pid = os.getpid()
    attempt = Attempt(
        number=number,
        cluster=cluster,
        job_id=job_id,
        restart=restart,
        nodes=tuple(nodes),
        started=time.time(),
        pid=pid,
    )
    _append(folder, attempt)
    return attempt


def end_attempt(attempt: Attempt, run_folder: Path | str, outcome: Outcome) -> Attempt:
    """Record the end of an attempt, now."""
    return _close(attempt, Path(run_folder), ended=time.time(), **asdict(outcome))


def record_requeue(attempt: Attempt, run_folder: Path | str) -> None:
    """Record that the job of an attempt, which has ended, is in the queue again."""
    _append(Path(run_folder), replace(attempt, is_requeued=True))


def _close(attempt: Attempt, folder: Path, **changes: Any) -> Attempt:
    """Append the end of an attempt. Default of `ended`: the time of its last journal line."""
    *_, row = [Row(step=0, time=0.0, metrics={}), *last_rows(folder)]
    saved = saved_step(folder)
    values: dict[str, Any] = {
        "ended": max(attempt.started, row.time),
        "checkpoint_step": saved,
        # A checkpoint is flushed to disk; the journal's last lines may be lost.
        "last_step": max(row.step, saved),
    }
    closed = replace(attempt, **values | changes)
    _append(folder, closed)
    return closed


def saved_step(run_folder: Path) -> int:
    """Return the step of the newest checkpoint, 0 without one."""
    return max(map(step_of, step_folders(run_folder / "checkpoints")), default=0)


def is_complete(run_folder: Path) -> bool:
    """Return True if the training has its last checkpoint."""
    start = read_start(run_folder)
    return start is not None and saved_step(run_folder) >= start.total_steps


def last_lines(path: Path) -> list[bytes]:
    """Return the whole lines in the last TAIL_BYTES of a file; empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES)
            file.seek(start)
            lines = file.readlines()
    except OSError:
        return []
    if start:
        # The first of them has lost its beginning.
        return lines[1:]
    return lines


def last_rows(run_folder: Path) -> list[Row]:
    """Return the last rows of a run's journal; those that cannot be read count as not logged."""
    return list(filter(None, map(decode, last_lines(run_folder / JOURNAL_NAME))))


def _append(folder: Path, attempt: Attempt) -> None:
    """Append an event. If storage keeps refusing it, print a warning and drop it."""

    def append() -> None:
        folder.mkdir(parents=True, mode=0o700, exist_ok=True)
        append_event(folder, ATTEMPT, asdict(attempt))

    # A run goes on without its record rather than end for it.
    with or_warn(folder / EVENTS_NAME, lambda text: print_note(text)):
        retried(append)


def failure_outcome(seen: Failure, run_folder: Path | str, *, attempt: str) -> Outcome:
    """The outcome of a failed attempt.

    seen: what srun, or the parent of the ranks, saw. It is recorded, and counts, if no rank
    reported the failure: a killed rank cannot, and one that has only lost its peer does not know
    the cause.
    """
    reports = []
    is_killed = seen.kind is FailureKind.KILLED
    is_reported = False
    for report in read_failures(run_folder, attempt=attempt):
        # Of a killed rank the parent knows the signal, the other ranks only that it is gone.
        if is_killed and (report.kind, report.rank) == (seen.kind, seen.rank):
            report = seen
            is_reported = True
        reports.append(report)

    if not reports or (is_killed and not is_reported):
        record_failure(run_folder, replace(seen, attempt=attempt))
        reports.append(seen)

    # Of several reports, that of the rank that knows the cause counts.
    culprit = cause(reports)
    assert culprit is not None
    reason = culprit.text
    if culprit is seen:
        # Its text already names the rank and the node.
        reason = seen.what
    failed_node = culprit.node
    if culprit.kind is FailureKind.PEER_LOST:
        # This is the node that noticed.
        failed_node = None
    return Outcome(
        ending=Ending.FAILED,
        reason=reason,
        exit_code=culprit.kind.exit_code,
        kind=culprit.kind,
        failed_rank=culprit.rank,
        failed_node=failed_node,
    )


def ended_with(who: str, code: int) -> Failure:
    """Describe a failure by its exit code."""
    kind = KIND_OF_EXIT_CODE.get(code, FailureKind.OTHER)
    return Failure(kind=kind, what=f"{who} ended with code {code}")
