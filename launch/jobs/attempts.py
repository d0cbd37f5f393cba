"""Record the attempts of a run: when each started and ended, why, and what it gained.

Owns: the attempts among the events of a run folder.
Leaves out: the file of the events (`vitscale.distributed.events`), and deciding whether
to start again (`after`).

Each attempt is two events, one at its start and one at its end. An attempt whose machine died has
no second one: the next attempt appends it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from vitscale.checkpoint.folders import step_folders, step_of
from vitscale.config.errors import FailureKind
from vitscale.distributed.events import EVENTS_NAME, append_event, read_events
from vitscale.distributed.retry import or_warn, retried
from vitscale.tracking.journal import JOURNAL_NAME, decode

# Name of the event.
ATTEMPT = "attempt"
CHECKPOINTS_NAME = "checkpoints"
# Longer than any line of a journal.
JOURNAL_TAIL_BYTES = 1 << 16


class Ending(StrEnum):
    """Why an attempt ended."""

    DONE = "done"
    STOPPED = "stopped"
    """By a signal, after a checkpoint or before the first step: time limit, preemption, pause."""
    ENDED_BY_SLURM = "ended by SLURM"
    """Cancelled, requeued or preempted without time for a checkpoint."""
    BAD_INPUT = "bad input"
    DIVERGED = "diverged"
    FAILED = "failed"
    KILLED = "killed"
    """A rank ended by a signal that it does not handle: SIGKILL, out of memory, SIGSEGV."""
    LOST = "lost"
    """Without a record of its end."""


FAILURES = (Ending.FAILED, Ending.KILLED)
# The next start would end in the same way.
FINAL = (Ending.BAD_INPUT, Ending.DIVERGED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
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
    """Of the launcher, if it is local."""
    ended: float | None = None
    """None while it runs."""
    ending: Ending | None = None
    reason: str = ""
    """What happened, as a sentence that names rank, node and signal where they are known."""
    kind: FailureKind | None = None
    """Of the failure that ended it."""
    exit_code: int | None = None
    failed_node: str | None = None
    """The node of the rank that caused the failure."""
    checkpoint_step: int = 0
    """Step of the newest checkpoint at the end."""
    last_step: int = 0
    """Last step in the journal at the end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How an attempt ended; fields as in `Attempt`."""

    ending: Ending
    reason: str
    exit_code: int
    kind: FailureKind | None = None
    failed_node: str | None = None


def read_attempts(run_folder: Path | str) -> list[Attempt]:
    """All attempts, oldest first; empty without events. Unreadable ones are skipped."""
    attempts: dict[int, Attempt] = {}
    for row in read_events(run_folder):
        attempt = _decode(row) if row["event"] == ATTEMPT else None
        if attempt is not None:
            attempts[attempt.number] = attempt
    return [attempts[number] for number in sorted(attempts)]


def begin_attempt(
    run_folder: Path | str,
    *,
    cluster: str,
    job_id: str,
    restart: int = 0,
    nodes: Sequence[str] = (),
    started: float | None = None,
) -> Attempt:
    """Record the start of an attempt, now or at `started`. Closes an attempt without an end."""
    folder = Path(run_folder)
    before = read_attempts(folder)
    if before and before[-1].ended is None:
        reason = "no record of its end: SLURM ended it at once, or its node died"
        _close(before[-1], folder, ending=Ending.LOST, reason=reason)
    attempt = Attempt(
        number=before[-1].number + 1 if before else 1,
        cluster=cluster,
        job_id=job_id,
        restart=restart,
        nodes=tuple(nodes),
        started=time.time() if started is None else started,
        pid=os.getpid() if cluster == "local" else None,
    )
    _append(folder, attempt)
    return attempt


def end_attempt(attempt: Attempt, run_folder: Path | str, outcome: Outcome) -> Attempt:
    """Record the end of an attempt, now."""
    return _close(attempt, Path(run_folder), ended=time.time(), **asdict(outcome))


def _close(attempt: Attempt, folder: Path, **changes: Any) -> Attempt:
    """Without `ended` in the changes, its last line in the journal counts as the end."""
    step, logged = _last_row(folder / JOURNAL_NAME)
    saved = next(map(step_of, step_folders(folder / CHECKPOINTS_NAME)), 0)
    ended = max(attempt.started, logged)
    changes = {"ended": ended, "checkpoint_step": saved, "last_step": max(step, saved)} | changes
    closed = replace(attempt, **changes)
    _append(folder, closed)
    return closed


def _last_row(path: Path) -> tuple[int, float]:
    """Step and time of the last readable line of a journal; (0, 0) without one."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - JOURNAL_TAIL_BYTES))
            lines = file.readlines()
    except OSError:
        return 0, 0.0
    rows = (decode(line) for line in reversed(lines))
    return next(((row.step, row.time) for row in rows if row is not None), (0, 0.0))


def _append(folder: Path, attempt: Attempt) -> None:
    """Append an event. Lost, with a warning, where storage refuses it for seconds."""
    values = {key: value for key, value in asdict(attempt).items() if value not in (None, (), "")}

    def append() -> None:
        folder.mkdir(parents=True, mode=0o700, exist_ok=True)
        append_event(folder, ATTEMPT, values)

    with or_warn(folder / EVENTS_NAME, lambda text: print(text, file=sys.stderr, flush=True)):
        retried(append)


def _decode(row: dict[str, Any]) -> Attempt | None:
    known = {field.name for field in fields(Attempt)}
    values = {key: value for key, value in row.items() if key in known}
    try:
        values["nodes"] = tuple(map(str, values.get("nodes", ())))
        for key, kind in (("ending", Ending), ("kind", FailureKind)):
            if key in values:
                values[key] = kind(values[key])
        return Attempt(**values)
    except (ValueError, TypeError):
        return None
