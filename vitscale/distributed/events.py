"""The record of what happened to a run: `events/NODE.jsonl` in its folder, one JSON object a line.

Needs no torch. Leaves out the events of attempts (`launch.jobs.attempts`).

A line: {"event": "failed", "time": 1763700000.25, "attempt": "17/0", "kind": "storage", "rank": 3,
"node": "n2", "step": 120, "what": "...", "reported_by": 3}. The rank that knows the cause writes
it: the rank that failed, or the one that found another killed or hung. A rank that only lost its
peer writes kind "peer lost", which is the cause if no other rank knows better.
"""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from vitscale.config.errors import FailureKind
from vitscale.distributed.processes import node_name

EVENTS_NAME = "events"
# Names one attempt to run a job; set by what starts the ranks.
ATTEMPT_VARIABLE = "VITSCALE_ATTEMPT"
STARTED = "started"
FAILED = "failed"
# Kinds of reports by ranks that do not know the cause: the best guess first, behind all others.
GUESSES = {FailureKind.OTHER: 1, FailureKind.HANG: 2, FailureKind.PEER_LOST: 3}


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why an attempt failed, as one process reports it."""

    kind: FailureKind
    what: str
    """One sentence, which names the culprit."""
    rank: int | None = None
    """The culprit; None if it is not a rank."""
    node: str | None = None
    """Where the culprit runs."""
    step: int | None = None
    """Steps done before."""
    reported_by: int | None = None
    """The rank that wrote it; None: what started the ranks."""
    attempt: str | None = None
    """`ATTEMPT_VARIABLE` of the process that wrote it."""
    time: float = 0.0
    """Unix seconds."""

    @property
    def text(self) -> str:
        """Such as `rank 3 on n2 ended with an error: no space left (storage, step 120)`."""
        when = ""
        if self.step is not None:
            when = f", step {self.step}"
        return f"{self.what} ({self.kind}{when})"


@dataclass(frozen=True, kw_only=True)
class TrainingStart:
    """One start of a training."""

    time: float
    """Unix seconds."""
    first_step: int
    """Step that it resumes from; 0: none."""
    total_steps: int
    node: str | None = None
    pid: int | None = None
    """Process of rank 0, which runs on `node`."""


READ_FAILURE = TypeAdapter(Failure)
READ_START = TypeAdapter(TrainingStart)
Event = TypeVar("Event")


def append_event(run_folder: Path | str, event: str, values: Mapping[str, Any]) -> None:
    """Append one line to this node's events of a run folder that exists. Raises OSError.

    Appends of several nodes to one file would be lost on NFS; those of one node are whole.
    """
    row = {"event": event, "time": round(time.time(), 3)} | dict(values)
    folder = Path(run_folder) / EVENTS_NAME
    folder.mkdir(exist_ok=True)
    # A line that was cut off must not swallow this one.
    line = b"\n" + json.dumps(row).encode() + b"\n"
    with open(folder / f"{node_name()}.jsonl", "ab", buffering=0) as file:
        if file.write(line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(file.fileno())


def read_events(run_folder: Path | str) -> list[dict[str, Any]]:
    """All readable events of all nodes, oldest first; none without a file.

    Those of one node are in the order of their lines, also where its clock was set back.
    """
    rows = []
    for path in (Path(run_folder) / EVENTS_NAME).glob("*.jsonl"):
        moment = math.inf
        with suppress(OSError):
            for line in reversed(path.read_bytes().splitlines()):
                # A line that was cut off, or that another version wrote, is left out.
                with suppress(ValueError, TypeError, KeyError, RecursionError):
                    row = json.loads(line)
                    # No later than the line that follows.
                    moment = min(moment, float(row["time"]))
                    rows.append((moment, row["event"], row))
    return [row for _, _, row in sorted(reversed(rows), key=lambda each: each[0])]


def read_as(
    adapter: TypeAdapter[Event], event: str, run_folder: Path | str
) -> list[Event]:
    """All readable events of one name, oldest first; another version may have written others."""
    found = []
    for row in read_events(run_folder):
        if row["event"] == event:
            with suppress(ValidationError):
                found.append(adapter.validate_python(row))
    return found


def record_start(run_folder: Path | str, *, first_step: int, total_steps: int) -> None:
    """Append that a training starts, now, in this process. Raises OSError."""
    steps = {"first_step": first_step, "total_steps": total_steps}
    append_event(run_folder, STARTED, steps | {"node": node_name(), "pid": os.getpid()})


def read_start(run_folder: Path | str) -> TrainingStart | None:
    """The last start of a training; None without one."""
    return next(reversed(read_as(READ_START, STARTED, run_folder)), None)


def record_failure(run_folder: Path | str, failure: Failure) -> None:
    """Append a report of a failure, now and, if it names none, for the attempt of this process.

    A full or failing disk, or no such folder, loses the line, not the process.
    """
    # Unset fields are not written: readers take the defaults.
    values = asdict(failure) | {"time": None}
    values["attempt"] = failure.attempt or os.environ.get(ATTEMPT_VARIABLE) or None
    with suppress(OSError):
        append_event(
            run_folder, FAILED, {k: v for k, v in values.items() if v is not None}
        )


def read_failures(
    run_folder: Path | str, *, attempt: str | None = None
) -> list[Failure]:
    """All reports in the order of the file, or those of one attempt."""
    found = read_as(READ_FAILURE, FAILED, run_folder)
    return [each for each in found if attempt is None or each.attempt == attempt]


def cause(reports: Sequence[Failure]) -> Failure | None:
    """The report that names the cause: the first from a process that knows it.

    A rank that lost its peer knows least, and one that found a hang may have found what a failure
    elsewhere did to the others. What a rank says of itself is more than what others saw of it.
    """
    # Ranks that report about themselves know the cause better than their observers.
    spoke = {each.rank for each in reports if each.rank == each.reported_by is not None}
    reports = [
        each
        for each in reports
        if each.rank not in spoke or each.rank == each.reported_by
    ]

    # Causes come before guesses; of equal ones `min` returns the first, which is the earliest.
    return min(reports, key=lambda each: GUESSES.get(each.kind, 0), default=None)
