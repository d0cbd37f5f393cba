"""Record the attempts of a run: when each started and ended, why, and what it gained.

Owns: the attempts among the events of a run folder, and the record of each task, a file beside
its log.
Leaves out: the file of the events (`vitscale.distributed.failures.events`), and deciding whether
to start again (`supervision`).

Each attempt is two events, one at its start and one at its end. An attempt whose machine died has
no second one: the next attempt appends it.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from vitscale.checkpoint.folders import MANIFEST, step_folders, step_of
from vitscale.config.errors import FailureKind
from vitscale.distributed.atomic_files import write_json
from vitscale.distributed.failures.events import EVENTS_NAME, append_event, read_events
from vitscale.distributed.failures.storage import or_warn, retried
from vitscale.tracking.journal import JOURNAL_NAME, decode

# Name of the event.
ATTEMPT = "attempt"
CHECKPOINTS_NAME = "checkpoints"
RECORD_SUFFIX = "_task.json"
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
    nodes: tuple[str, ...]
    num_tasks: int
    started: float
    first_step: int
    """Step of the newest checkpoint at the start."""
    pid: int | None = None
    """Of the launcher, if it is local."""
    ended: float | None = None
    """None while it runs."""
    ending: Ending | None = None
    reason: str = ""
    """What happened, as a sentence that names rank, node and signal where they are known."""
    kind: FailureKind | None = None
    """Of the failure that ended it; None without one, and in records of older versions."""
    exit_code: int | None = None
    failed_nodes: tuple[str, ...] = ()
    """The node of the rank that caused the failure."""
    checkpoint_step: int | None = None
    """Step of the newest checkpoint at the end."""
    last_step: int | None = None
    """Last step in the journal at the end."""

    @property
    def steps_gained(self) -> int:
        """Steps by which the newest checkpoint advanced."""
        return max(0, (self.checkpoint_step or 0) - self.first_step)


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderProgress:
    """The newest checkpoint and the last logged step of a run folder."""

    checkpoint_step: int
    """0 without a checkpoint."""
    committed: float | None
    """When that checkpoint was committed, unix seconds."""
    last_step: int
    """Last step in the journal; 0 without one."""


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
    restart: int,
    nodes: Sequence[str],
    num_tasks: int,
    started: float | None = None,
) -> Attempt:
    """Record the start of an attempt, now or at `started`. Closes an attempt without an end."""
    folder = Path(run_folder)
    before = read_attempts(folder)
    if before and before[-1].ended is None:
        _append(folder, _closed(before[-1], folder))
    attempt = Attempt(
        number=before[-1].number + 1 if before else 1,
        cluster=cluster,
        job_id=job_id,
        restart=restart,
        nodes=tuple(nodes),
        num_tasks=num_tasks,
        started=time.time() if started is None else started,
        first_step=read_progress(folder).checkpoint_step,
        pid=os.getpid() if cluster == "local" else None,
    )
    _append(folder, attempt)
    return attempt


def end_attempt(
    attempt: Attempt,
    run_folder: Path | str,
    *,
    ending: Ending,
    reason: str,
    exit_code: int | None,
    kind: FailureKind | None = None,
    failed_nodes: Sequence[str] = (),
) -> Attempt:
    """Record the end of an attempt, now."""
    folder = Path(run_folder)
    ended = replace(
        attempt,
        ended=time.time(),
        ending=ending,
        reason=reason,
        exit_code=exit_code,
        kind=kind,
        failed_nodes=tuple(failed_nodes),
        **_gains(read_progress(folder)),
    )
    _append(folder, ended)
    return ended


def read_progress(run_folder: Path) -> FolderProgress:
    """The newest checkpoint by name, unverified, and the last step in the journal."""
    folders = step_folders(run_folder / CHECKPOINTS_NAME)
    committed = None
    if folders:
        try:
            committed = (folders[0] / MANIFEST).stat().st_mtime
        except FileNotFoundError:  # removed meanwhile
            folders = []
    return FolderProgress(
        checkpoint_step=step_of(folders[0]) if folders else 0,
        committed=committed,
        last_step=_last_row(run_folder / JOURNAL_NAME)[0],
    )


def _last_row(path: Path) -> tuple[int, float | None]:
    """Step and time of the last readable line of a journal; (0, None) without one."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - JOURNAL_TAIL_BYTES))
            lines = file.readlines()
    except FileNotFoundError:
        return 0, None
    rows = (decode(line) for line in reversed(lines))
    return next(((row.step, row.time) for row in rows if row is not None), (0, None))


def _gains(progress: FolderProgress) -> dict[str, Any]:
    return {
        "checkpoint_step": progress.checkpoint_step,
        "last_step": max(progress.last_step, progress.checkpoint_step),
    }


def _closed(attempt: Attempt, folder: Path) -> Attempt:
    """An attempt that left no record of its end; its last sign of life counts as the end."""
    progress = read_progress(folder)
    signs = (attempt.started, progress.committed, _last_row(folder / JOURNAL_NAME)[1])
    ended = max(sign for sign in signs if sign is not None)
    return replace(
        attempt,
        ended=ended,
        ending=Ending.LOST,
        reason="no record of its end: SLURM ended it at once, or its supervisor or node died",
        **_gains(progress),
    )


def _append(folder: Path, attempt: Attempt) -> None:
    """Append an event. Lost where storage refuses it for seconds."""
    values = {key: value for key, value in asdict(attempt).items() if value not in (None, (), "")}

    def append() -> None:
        folder.mkdir(parents=True, mode=0o700, exist_ok=True)
        append_event(folder, ATTEMPT, values)

    with or_warn(folder / EVENTS_NAME, _say):
        retried(append)


def _decode(row: dict[str, Any]) -> Attempt | None:
    known = {field.name for field in fields(Attempt)}
    values = {key: value for key, value in row.items() if key in known}
    try:
        for key in ("nodes", "failed_nodes"):
            values[key] = tuple(map(str, values.get(key, ())))
        if "ending" in values:
            values["ending"] = Ending(values["ending"])
        if "kind" in values:
            values["kind"] = FailureKind(values["kind"])
        return Attempt(**values)
    except (ValueError, TypeError):
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskRecord:
    """State of one task in one attempt."""

    rank: int
    pid: int
    node: str = ""
    exit_code: int | None = None
    """None while the task runs, and after it was killed."""
    ended: float | None = None
    """Seconds since the epoch."""


def task_record_path(folder: Path, *, job_id: str, rank: int) -> Path:
    """The record of a task's newest attempt."""
    return folder / f"{job_id}_{rank}{RECORD_SUFFIX}"


def read_task_record(path: Path) -> TaskRecord | None:
    """The record; None before the task has started."""
    try:
        return TaskRecord(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None


def read_task_records(folder: Path, *, job_id: str) -> list[TaskRecord]:
    """The records of all tasks of the job in its newest attempt."""
    records = map(read_task_record, _record_paths(folder, job_id))
    return [record for record in records if record is not None]


def set_aside_task_records(folder: Path, *, job_id: str, restart: int) -> None:
    """Keep the records of the attempt before this restart: 17_0_task.json as 17_0_task_1.json."""
    for path in _record_paths(folder, job_id):
        path.rename(path.with_name(f"{path.stem}_{restart}.json"))


def _record_paths(folder: Path, job_id: str) -> list[Path]:
    name = re.compile(rf"{re.escape(job_id)}_\d+{re.escape(RECORD_SUFFIX)}")
    return sorted(path for path in folder.glob(f"*{RECORD_SUFFIX}") if name.fullmatch(path.name))


def write_record(path: Path, record: TaskRecord) -> None:
    with or_warn(path, _say):
        retried(lambda: write_json(path, asdict(record)))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
