"""Find out the state of a run: queued, running, paused, stopped, finished or failed, and why.

Owns: the state, from the queue, the events, the journal and the newest checkpoint, and finding the
folders that names mean. Changes nothing and takes no lock.
Leaves out: showing it (`text`, `following`).
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import yaml

from launch.jobs.attempts import FAILURES, FINAL, Attempt, Ending, read_attempts
from launch.jobs.queue import QueuedJob, jobs_of
from vitscale.checkpoint.folders import step_folders, step_of
from vitscale.config.errors import FailureKind, UserError, UserErrors, nearest
from vitscale.distributed.events import (
    EVENTS_NAME,
    TrainingStart,
    cause,
    read_failures,
    read_start,
)
from vitscale.distributed.processes import is_alive, node_name
from vitscale.tracking.journal import JOURNAL_NAME, decode
from vitscale.tracking.mlflow_sync import ARTIFACTS_FOLDER

RUNS_FOLDER = Path("runs")
# runs/CHAIN/STAGE/RUN
MAX_DEPTH = 3
RUN_FILES = ("config.yaml", JOURNAL_NAME, EVENTS_NAME)
# All that a run has that was submitted, or started, and has not trained yet.
JOB_FOLDERS = ("slurm", "local")
# Of an evaluation, whose journal has image sizes as steps.
RESULTS_NAME = "results.json"
# JOB STATE CODES of `man squeue`, of jobs that have no nodes.
WAITING_STATES = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "SUSPENDED")
# Hold thousands of lines: the last evaluation is among them.
TAIL_BYTES = 1 << 18
# The last line of a traceback, or of our own report.
ERROR_LINE = re.compile(r"(\[?rank ?\d+\]?: ?)?([\w.]*(Error|Exception)\b|error: )")
ATTEMPT_LINE = re.compile(r" attempt \d+ of the run, job ")


class RunState(StrEnum):
    RUNNING = "running"
    QUEUED = "queued"
    """Its job has not started yet."""
    PAUSED = "paused"
    """Its job was requeued and resumes the run when it starts again."""
    FAILED = "failed"
    STOPPED = "stopped"
    """Nothing runs or waits; the same command resumes it."""
    NOT_STARTED = "not started"
    FINISHED = "finished"


ACTIVE = (RunState.RUNNING, RunState.QUEUED, RunState.PAUSED)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedProgress:
    """What a training has logged. Times are unix seconds."""

    step: int
    """Of the last line in the journal, or of the newest checkpoint if that is later."""
    checkpoint_step: int
    """0 without a checkpoint."""
    total_steps: int | None
    """None before its first start."""
    eta_s: float | None
    """Seconds left at `time`, at the mean speed since the start; None before the second line."""
    time: float | None
    """Of the last line in the journal."""
    images_per_s: float | None
    mfu: float | None
    """Model FLOP/s utilisation, 0 to 1; None where the device's rate is unknown."""
    loss: float | None
    results: dict[str, float]
    """Last values of the evaluations' metrics, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFailure:
    """Why a run failed."""

    what: str
    """A sentence that names rank and node where they are known."""
    error_line: str | None = None
    """Last error line of the log, where no rank has recorded the cause."""
    kind: FailureKind | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """One run now. Times are unix seconds."""

    folder: Path
    state: RunState
    since: float | None
    """Since when it is queued, paused or running, or when it ended."""
    job: QueuedJob | None
    """The job that runs, else the one that waits longest."""
    place: str
    """Where it runs: a job with its nodes, or a process; empty if nothing is known."""
    logged: LoggedProgress
    attempt: Attempt | None
    """The newest one."""
    restarts: dict[str, int]
    """How attempts ended that another one followed or will follow -> how many."""
    failure: RunFailure | None
    log: Path | None
    """The newest log of rank 0."""


def read_state(folder: Path, jobs: Sequence[QueuedJob] | None) -> RunStatus:
    """The state of the run in `folder`.

    jobs: all jobs of the user, from `known_jobs`.
    """
    attempts, start, logged = read_attempts(folder), read_start(folder), _read_logged(folder)
    last = attempts[-1] if attempts else None
    is_open = last is not None and last.ended is None
    queued = jobs_of(folder, jobs=jobs or ())
    at_work = (job for job in queued if job.state not in WAITING_STATES)
    job = next(at_work, queued[0] if queued else None)
    pid = _live_pid(last if is_open else None, start)
    failure = None
    place = "" if last is None else f"job {last.job_id} on {', '.join(last.nodes)}"
    # Of a run that has ended, or runs without a job.
    since = (last.ended or last.started) if last is not None else start.time if start else None
    if job is not None:
        place = f"job {job.job_id}" + (f" on {job.nodes}" if job.nodes else "")
        if job.state in WAITING_STATES:
            has_started = last is not None and last.job_id == job.job_id
            state = RunState.PAUSED if has_started else RunState.QUEUED
            since = job.submitted
        else:
            state = RunState.RUNNING
            since = last.started if last is not None and is_open else job.start
    elif pid is not None:
        state, place = RunState.RUNNING, f"process {pid} on this machine"
    elif jobs is None and is_open and last is not None and last.cluster == "slurm":
        state = RunState.RUNNING
        place += ", as its records say: SLURM does not answer"
    else:
        state, failure = _ended_state(folder, last, start, logged)
        since = last.ended if last is not None and last.ended is not None else logged.time
    followed = attempts if state in ACTIVE else attempts[:-1]
    return RunStatus(
        folder=folder,
        state=state,
        since=since,
        job=job,
        place=place,
        logged=logged,
        attempt=last,
        restarts=dict(Counter(str(each.ending) for each in followed if each.ending is not None)),
        failure=failure,
        log=newest_log(folder),
    )


def _live_pid(attempt: Attempt | None, start: TrainingStart | None) -> int | None:
    """A process of the run on this machine: the launcher of an open attempt, else rank 0."""
    here = node_name()
    found = []
    if attempt is not None and attempt.cluster == "local" and here in attempt.nodes:
        found.append(attempt.pid)
    if start is not None and start.node == here:
        found.append(start.pid)
    return next((pid for pid in found if pid is not None and is_alive(pid)), None)


def _ended_state(
    folder: Path, last: Attempt | None, start: TrainingStart | None, logged: LoggedProgress
) -> tuple[RunState, RunFailure | None]:
    """The state of a run without a job or process."""
    is_saved = logged.total_steps is not None and logged.checkpoint_step >= logged.total_steps
    if is_saved or (last is not None and last.ending is Ending.DONE):
        return RunState.FINISHED, None
    if last is not None and (last.ended is None or last.ending in (*FAILURES, *FINAL)):
        what = last.reason or "no record of its end: its node died, or SLURM ended the job"
        known = last.kind not in (None, FailureKind.OTHER)
        line = None if known else _last_error(newest_log(folder))
        return RunState.FAILED, RunFailure(what=what, error_line=line, kind=last.kind)
    if last is None and start is None:
        if (folder / RESULTS_NAME).is_file() or _has_made_shards(folder):
            return RunState.FINISHED, None
        return (RunState.STOPPED if logged.step else RunState.NOT_STARTED), None
    if last is None and start is not None:
        # Started without a launcher of ours; its ranks have recorded why it failed, if they could.
        found = cause([each for each in read_failures(folder) if each.time >= start.time])
        if found is not None:
            return RunState.FAILED, RunFailure(what=found.text, kind=found.kind)
    return RunState.STOPPED, None


def _has_made_shards(folder: Path) -> bool:
    """Whether the newest configuration of a data preparation has its manifest."""
    files = sorted(folder.glob("*/config-*.yaml"), key=lambda path: path.stat().st_mtime)
    if not files:
        return False
    try:
        output = yaml.safe_load(files[-1].read_text()).get("output")
    except (OSError, yaml.YAMLError, AttributeError):
        return False
    return (Path(str(output)).expanduser() / "manifest.json").is_file()


def newest_log(folder: Path) -> Path | None:
    """The log of rank 0 that was written to last."""
    logs = [path for each in JOB_FOLDERS for path in folder.glob(f"{each}/*/*_0_log.out")]
    return max(logs, key=lambda path: path.stat().st_mtime, default=None)


def _last_error(log: Path | None) -> str | None:
    """The newest attempt's last error line; without one, `last line: ...`."""
    last = error = None
    is_next = False
    for line in (each.decode(errors="replace").strip() for each in (_tail(log) if log else ())):
        if ATTEMPT_LINE.search(line):
            last = error = None
        if is_next or ERROR_LINE.match(line):
            error = line
        # A report of several lines: the first one is below its heading.
        is_next = line == "error:"
        last = line or last
    return error or (f"last line: {last}" if last else None)


def _read_logged(run_folder: Path) -> LoggedProgress:
    """The run's journal and checkpoints. Missing files and unreadable lines count as not logged."""
    rows = [row for row in map(decode, _tail(run_folder / JOURNAL_NAME)) if row is not None]
    last = {key: value for row in rows for key, value in row.metrics.items()}
    named = {key.rpartition("/")[2]: value for key, value in last.items()}
    start = read_start(run_folder)
    saved = next(map(step_of, step_folders(run_folder / "checkpoints")), 0)
    eta = None
    since = [row for row in rows if start is not None and row.time >= start.time]
    if start is not None and since and (done := since[-1].step - since[0].step):
        pace = (since[-1].time - since[0].time) / done
        eta = pace * (start.total_steps - since[-1].step)
    return LoggedProgress(
        step=max(rows[-1].step if rows else 0, saved),
        checkpoint_step=saved,
        total_steps=start.total_steps if start is not None else None,
        eta_s=eta,
        time=rows[-1].time if rows else None,
        images_per_s=named.get("images_per_s"),
        mfu=named.get("mfu"),
        loss=last.get("train/loss"),
        results={key: value for key, value in last.items() if key.startswith("val/")},
    )


def _tail(path: Path) -> list[bytes]:
    """The last whole lines of a file; none if it cannot be read."""
    try:
        with open(path, "rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES)
            file.seek(start)
            lines = file.readlines()
    except OSError:
        return []
    return lines[1:] if start else lines


# ---- finding runs -----------------------------------------------------------------------------


def find_runs(names: Sequence[str]) -> list[Path]:
    """The run folders of each name: itself, or all below it; without names all below runs/.

    Raises UserErrors for every name that means none.
    """
    if not names:
        if found := list(_below(RUNS_FOLDER, depth=MAX_DEPTH)):
            return found
        raise UserError(
            f"no run folder below {RUNS_FOLDER.absolute()}",
            next_step="change to the folder that you started the run from, or name a run",
        )
    folders: list[Path] = []
    errors = []
    for name in names:
        there = next((each for each in (Path(name), RUNS_FOLDER / name) if each.is_dir()), None)
        found = [] if there is None else list(_below(there, depth=MAX_DEPTH))
        folders += found
        if not found:
            errors.append(_no_run(name, there))
    if errors:
        raise errors[0] if len(errors) == 1 else UserErrors(errors)
    return list(dict.fromkeys(folders))


def _below(folder: Path, *, depth: int) -> Iterator[Path]:
    """The folder if it is a run, else those in it."""
    found: list[Path] = []
    is_run = any((folder / name).is_file() for name in RUN_FILES)
    if not is_run and depth and folder.is_dir():
        # Copies of config.yaml are among the artifacts.
        skipped = (*JOB_FOLDERS, ARTIFACTS_FOLDER)
        inner = (path for path in folder.iterdir() if path.is_dir() and path.name not in skipped)
        found = [run for path in sorted(inner) for run in _below(path, depth=depth - 1)]
    yield from found
    if is_run or (not found and any((folder / name).is_dir() for name in JOB_FOLDERS)):
        yield folder


def _no_run(name: str, folder: Path | None) -> UserError:
    if folder is not None:
        return UserError(
            f"{folder} is no run folder, and has none below it",
            where="RUN",
            allowed=f"a folder with {', '.join(RUN_FILES)}, {' or '.join(JOB_FOLDERS)}/",
            next_step="give the output folder of a run",
        )
    known = [path.name for path in _below(RUNS_FOLDER, depth=MAX_DEPTH)]
    close = nearest(Path(name).name, known)
    what = f"{name} is a file, not a run folder" if Path(name).exists() else f"no such run: {name}"
    return UserError(
        what,
        where="RUN",
        allowed=f"a folder, or one of: {', '.join(known[:20])}" if known else "a run folder",
        next_step=f"did you mean {close}?" if close else None,
    )
