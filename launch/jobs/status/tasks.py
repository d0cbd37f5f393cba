"""Read the records and logs of a run's tasks: which run, which failed first, and its error.

Leaves out: the state of the run (`reading`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launch.jobs.attempts import RECORD_SUFFIX, Attempt, TaskRecord, read_task_record
from launch.jobs.monitor import NO_FAILURE, first_failure
from launch.jobs.queue import QueuedJob
from launch.jobs.status.progress import tail
from vitscale.config.errors import FailureKind
from vitscale.distributed.processes import is_alive

LOCAL = "local"
LOG_SUFFIX = "_log.out"
JOB_FOLDERS = ("slurm/*", f"{LOCAL}/*")
# In order: the last line of a traceback or of our own report, else what SLURM says.
ERROR_LINES = (
    re.compile(r"^(\[?rank ?\d+\]?: ?)?([\w.]*(Error|Exception)\b|error: )"),
    re.compile(r"^(srun|slurmstepd\S*): error: "),
)
ATTEMPT_LINE = re.compile(r" attempt \d+ of the run, job ")
LAST_LINES = 400


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFailure:
    """Why a run failed."""

    what: str
    """A sentence that names rank and node where they are known."""
    nodes: tuple[str, ...]
    error_line: str | None
    """Last error line of the log; None if a rank or the supervisor recorded the cause."""
    log: Path | None


@dataclass(frozen=True, kw_only=True, slots=True)
class JobTasks:
    """The tasks of the newest job of a run. Empty before a task has started."""

    folder: Path | None = None
    records: dict[Path, TaskRecord] = field(default_factory=dict)

    @property
    def logs(self) -> list[Path]:
        return [] if self.folder is None else list(self.folder.glob(f"*{LOG_SUFFIX}"))

    @property
    def is_local(self) -> bool:
        return self.folder is not None and self.folder.parent.name == LOCAL

    @property
    def local_pid(self) -> int | None:
        """A task that runs on this machine."""
        running = (r.pid for r in self.records.values() if r.exit_code is None)
        return next((pid for pid in running if self.is_local and is_alive(pid)), None)

    @property
    def all_done(self) -> bool:
        return bool(self.records) and all(r.exit_code == 0 for r in self.records.values())

    def counts(self, live: Sequence[QueuedJob]) -> dict[str, int]:
        """State -> number of the tasks of an array; empty if the job is no array.

        live: its jobs in the queue, one for each task.
        """
        arrays = {p: r for p, r in self.records.items() if _array_task(p) is not None}
        # A run may also have two plain jobs, of which the second waits for the first.
        live = [job for job in live if "_" in job.job_id]
        if not arrays and not live:
            return {}
        counts = Counter("queued" if job.state == "PENDING" else "running" for job in live)
        ids = {job.job_id for job in live}
        for path, record in arrays.items():
            if _array_task(path) not in ids:
                is_failure = record.exit_code not in NO_FAILURE
                ending = "stopped" if record.exit_code else "finished"
                counts["failed" if is_failure else ending] += 1
        return dict(counts)


def newest_tasks(folder: Path) -> JobTasks:
    """The tasks of the job in this run folder that was written to last."""
    found = [
        path
        for pattern in JOB_FOLDERS
        for path in folder.glob(pattern)
        if any(path.glob(f"*{LOG_SUFFIX}")) or any(path.glob(f"*{RECORD_SUFFIX}"))
    ]
    newest = max(found, key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        return JobTasks()
    read = {path: read_task_record(path) for path in sorted(newest.glob(f"*{RECORD_SUFFIX}"))}
    records = {path: record for path, record in read.items() if record is not None}
    return JobTasks(folder=newest, records=records)


def _array_task(record: Path) -> str | None:
    """ARRAY_TASK of the record of an array's task."""
    task = record.name.removesuffix(f"_0{RECORD_SUFFIX}")
    return task if "_" in task and task != record.name else None


def find_failure(tasks: JobTasks, attempt: Attempt | None, *, folder: Path) -> RunFailure | None:
    """The failure of the newest job; None if nothing in the run folder says so.

    attempt: the newest one.
    """
    failed = first_failure(list(tasks.records.values()), stopping=False)
    if attempt is None and failed is None:
        return None
    if attempt is not None and attempt.reason:
        what = attempt.reason
    elif failed is None:
        what = "no record of its end: its node died, or SLURM ended the job"
    else:
        how = "was killed" if failed.exit_code is None else f"ended with code {failed.exit_code}"
        node = f" on {failed.node}" if failed.node else ""
        what = f"rank {failed.rank}{node} {how}"
    log, is_recorded = None, attempt is not None and attempt.kind not in (None, FailureKind.OTHER)
    if failed is not None:
        path = next(path for path, record in tasks.records.items() if record is failed)
        log = path.with_name(path.name.removesuffix(RECORD_SUFFIX) + LOG_SUFFIX)
    elif attempt is not None:
        job_id = attempt.job_id
        log = folder / attempt.cluster / job_id / f"{job_id}_0{LOG_SUFFIX}"
    if log is not None and not log.exists():
        log = None
    return RunFailure(
        what=what,
        nodes=attempt.failed_nodes if attempt is not None else (),
        error_line=last_error(log) if log is not None and not is_recorded else None,
        log=log,
    )


def last_error(log: Path) -> str | None:
    """The last line of the log's last attempt that names an error; else its last line, called so.

    None for an empty log.
    """
    lines = [line.decode(errors="replace").strip() for line in tail(log)[-LAST_LINES:]]
    starts = [number for number, line in enumerate(lines) if ATTEMPT_LINE.search(line)]
    lines = [line for line in lines[starts[-1] if starts else 0 :] if line]
    for pattern in ERROR_LINES:
        for number in range(len(lines) - 1, -1, -1):
            if lines[number] == "error:" and number + 1 < len(lines):
                return lines[number + 1]
            if pattern.match(lines[number]):
                return lines[number]
    return f"last line: {lines[-1]}" if lines else None
