"""Find out and show the state of a run: queued, running, paused, stopped, finished or failed.

It follows from the queue, the events, the journal and the newest checkpoint. Also finds the folders
that names mean, and follows one run to its end. Changes nothing and takes no lock.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from shlex import quote

import yaml

from launch.jobs.attempts import Attempt, Ending, last_lines, read_attempts
from launch.jobs.processes import EXIT_INTERRUPTED, LogTail
from launch.jobs.queue import QueuedJob, jobs_of, jobs_with_script, known_jobs
from launch.jobs.reasons import BY_ITSELF, WAITING_STATES, how_it_ended, why_it_waits
from vitscale.checkpoint.folders import step_folders, step_of
from vitscale.config.errors import (
    EXIT_STOPPED_RESUMABLE,
    FailureKind,
    UserError,
    UserErrors,
    did_you_mean,
)
from vitscale.distributed.events import (
    Failure,
    TrainingStart,
    cause,
    read_failures,
    read_start,
)
from vitscale.distributed.processes import is_alive, node_name
from vitscale.tracking.journal import JOURNAL_NAME, decode, format_duration
from vitscale.tracking.mlflow_sync import ARTIFACTS_FOLDER

RUNS_FOLDER = Path("runs")
# runs/CHAIN/STAGE/RUN
MAX_DEPTH = 3
RUN_FILES = ("config.yaml", JOURNAL_NAME)
# All that a run has that was submitted, or started, and has not trained yet.
JOB_FOLDERS = ("slurm", "local")
# Of an evaluation, whose journal has image sizes as steps.
RESULTS_NAME = "results.json"
SUBMIT_AGAIN = "the same command resumes it"
MAX_RESULTS = 4
# A run that has logged nothing for this long may hang.
QUIET_S = 60.0
# squeue loads the controller of the whole site.
FOLLOW_SECONDS = 4.0
# Of a log that exists when following begins.
LAST_LINES = 20


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


ORDER = list(RunState)
ACTIVE = ORDER[:3]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedProgress:
    """Progress that a training has logged. Times are unix seconds."""

    step: int
    """Step of the last line in the journal, or of the newest checkpoint if that is later."""
    checkpoint_step: int
    """0 without a checkpoint."""
    total_steps: int | None
    """None before its first start."""
    eta_s: float | None
    """Seconds left at `time`, at the mean speed since the start; None before the second line."""
    time: float | None
    """Time of the last line in the journal."""
    images_per_s: float | None
    mfu: float | None
    """Model FLOP/s utilisation, 0 to 1; None where the device's rate is unknown."""
    loss: float | None
    results: dict[str, float]
    """Last values of the evaluations' metrics, by name."""


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
    """Job with its nodes, or process, that runs it; empty if it does not run."""
    logged: LoggedProgress
    attempt: Attempt | None
    restarts: dict[str, int]
    """Ending of attempts that were or will be followed by another one -> number of them."""
    failure: Failure | None
    log: Path | None
    """The newest log of rank 0."""
    why: str = ""
    """Why it stopped or has not started; empty if nothing says so."""
    seen: float | None = None
    """When SLURM answered, by its own clock; None: this machine's clock counts."""


def read_state(folder: Path, jobs: Sequence[QueuedJob] | None) -> RunStatus:
    """The state of the run in `folder`.

    jobs: all jobs of the user, from `known_jobs`.
    """
    attempts = read_attempts(folder) or _attempts_of_tasks(folder)
    start, logged = read_start(folder), _read_logged(folder)
    last = attempts[-1] if attempts else None
    opened = last if last is not None and last.ended is None else None
    queued = sorted(
        jobs_of(folder, jobs=jobs or ()), key=lambda job: job.state in WAITING_STATES
    )
    job, failure, place = next(iter(queued), None), None, ""
    why = ""
    if job is not None:
        place = f"job {job.job_id}" + (f" on {job.nodes}" if job.nodes else "")
        # SLURM's clock is the one that counts below; those of nodes may differ.
        since = job.start
        if since is None and opened is not None:
            since = opened.started
        state = RunState.RUNNING
        if job.state in WAITING_STATES:
            has_started = last is not None and last.job_id == job.job_id
            state = RunState.PAUSED if has_started else RunState.QUEUED
            since = job.submitted
    elif pid := _live_pid(folder, opened, start):
        state, place = RunState.RUNNING, f"process {pid} on this machine"
        since = opened.started if opened is not None else start.time if start else None
    elif jobs is None and opened is not None and opened.cluster == "slurm":
        state, since = RunState.RUNNING, opened.started
        place = f"job {opened.job_id} on {', '.join(opened.nodes)}, as its records say: SLURM does "
        place += "not answer"
    else:
        state, failure, why = _ended_state(folder, last, start, logged, jobs)
        since = (
            last.ended if last is not None and last.ended is not None else logged.time
        )
    followed = attempts if state in ACTIVE else attempts[:-1]
    broken = [
        each.kind or each.ending for each in followed if each.ending is not Ending.DONE
    ]
    return RunStatus(
        folder=folder,
        state=state,
        since=since,
        job=job,
        place=place,
        logged=logged,
        attempt=last,
        restarts=dict(Counter(str(each) for each in broken if each)),
        failure=failure,
        log=newest_log(folder),
        why=why,
        seen=max(
            (each.seen for each in jobs_with_script(folder, jobs or ()) if each.seen),
            default=None,
        ),
    )


def jobs_for(folders: Sequence[Path]) -> list[QueuedJob] | None:
    """The user's jobs, if one of these runs may have one; None if SLURM does not answer.

    A controller that hangs takes a minute, which runs that have ended do not need.
    """
    return known_jobs() if any(map(_may_have_job, folders)) else []


def _may_have_job(folder: Path) -> bool:
    """Whether a script was submitted, and no attempt has reached the end since."""
    scripts = (folder / "slurm").glob("*submission_file_*")
    submitted = max((path.lstat().st_mtime for path in scripts), default=None)
    if submitted is None:
        return False
    attempts = read_attempts(folder) or _attempts_of_tasks(folder)
    ended = (
        attempts[-1].ended if attempts and attempts[-1].ending is Ending.DONE else None
    )
    return ended is None or submitted > ended


def _attempts_of_tasks(folder: Path) -> list[Attempt]:
    """Return the newest attempt of a data preparation, whose tasks record their own.

    Of an array that of a failed task, if there is one.
    """
    tasks = [
        path.parent
        for depth in ("*/*", "*/*/*")
        for path in folder.glob(f"{depth}/events")
    ]
    last = [attempts[-1] for task in tasks if (attempts := read_attempts(task))]
    last.sort(key=lambda each: each.started)
    job_id = last[-1].job_id.partition("_")[0] if last else ""
    of_job = [each for each in last if each.job_id.partition("_")[0] == job_id]
    return [each for each in of_job if each.ending is Ending.FAILED][-1:] or last[-1:]


def _live_pid(
    folder: Path, attempt: Attempt | None, start: TrainingStart | None
) -> int | None:
    """Find a process of the run on this machine: launcher of an open attempt, else rank 0."""
    here = node_name()
    found = []
    if attempt is not None and attempt.cluster == "local" and here in attempt.nodes:
        found.append(attempt.pid)
    if start is not None and start.node == here:
        found.append(start.pid)
    with suppress(OSError, ValueError):
        # An evaluation without a launcher has its lock alone: process 17 on n1.
        process, pid, _, node = (folder / ".lock").read_text().split()
        if (process, node) == ("process", here):
            found.append(int(pid))
    return next((pid for pid in found if pid is not None and is_alive(pid)), None)


def _ended_state(
    folder: Path,
    last: Attempt | None,
    start: TrainingStart | None,
    logged: LoggedProgress,
    jobs: Sequence[QueuedJob] | None,
) -> tuple[RunState, Failure | None, str]:
    """The state of a run without a job or process, and why it has not finished."""

    def failed(what: str) -> tuple[RunState, Failure, str]:
        kind = last.kind if last is not None and last.kind else FailureKind.OTHER
        return RunState.FAILED, Failure(kind=kind, what=what), ""

    is_saved = (
        logged.total_steps is not None and logged.checkpoint_step >= logged.total_steps
    )
    has_begun = last is not None or start is not None
    is_evaluated = not has_begun and (folder / RESULTS_NAME).is_file()
    is_done = last is not None and last.ending is Ending.DONE
    if is_saved or is_done or is_evaluated or _has_made_shards(folder):
        return RunState.FINISHED, None, ""
    for path in folder.glob(
        "slurm/*/*.failed_starts"
    ):  # of the batch script, without Python
        if path.stat().st_mtime > (0 if last is None else last.ended or last.started):
            node = path.read_text().split()[-1]
            return failed(f"Python did not start on {node}, or was killed")

    idle = RunState.STOPPED if has_begun or logged.step else RunState.NOT_STARTED
    if (end := _unrecorded_end(folder, last, start, jobs)) is not None:
        what, is_failed = end
        if is_failed:
            return failed(f"{what}; {SUBMIT_AGAIN}")
        return idle, None, what
    if last is not None and last.ending in (None, Ending.FAILED):
        lost = "no record of its end: it was cancelled, or its node died"
        return failed(last.reason or f"{lost}; {SUBMIT_AGAIN}")
    if last is None and start is not None:
        # Started without a launcher of ours; its ranks have recorded why it failed, if they could.
        found = cause(
            [each for each in read_failures(folder) if each.time >= start.time]
        )
        if found is not None:
            return RunState.FAILED, replace(found, what=found.text), ""
    return idle, None, last.reason if last is not None else ""


def _unrecorded_end(
    folder: Path,
    last: Attempt | None,
    start: TrainingStart | None,
    jobs: Sequence[QueuedJob] | None,
) -> tuple[str, bool] | None:
    """How the newest job ended where no attempt says so, and whether it failed.

    It may have ended before its first start or, after a requeue, before the next one. SLURM
    says how, for minutes. None if the records say all, or SLURM does not answer.
    """
    # submitit's links to JOB/JOB_submission.sh stay also where a job's folder is removed.
    links = [
        path for path in folder.glob("slurm/.submission_file_*") if path.is_symlink()
    ]
    newest = max(links, key=lambda path: path.lstat().st_mtime, default=None)
    if newest is None or jobs is None:
        return None
    job_id = newest.readlink().name.partition("_")[0]
    of_job = last is not None and last.job_id.partition("_")[0] == job_id
    begun = start.time if start is not None else 0.0
    if last is not None:
        begun = last.started
    # Started by hand, or by an earlier job, since the submission.
    if not of_job and begun > newest.lstat().st_mtime:
        return None

    before = " before the run started"
    reason = ""
    if of_job and last is not None:
        before = " before the run started again"
        reason = f"{last.reason}; requeued, but "
        is_open = last.ended is None or last.ending is Ending.ENDED_BY_SLURM
        if is_open:
            before = reason = ""
        elif not last.is_requeued:
            return None

    known = [
        job
        for job in jobs_with_script(folder, jobs)
        if job.has_ended and job.submitted_id == job_id
    ]
    if known:
        how, advice = how_it_ended(known[-1])
        what = f"{reason}job {job_id} {how}{before}"
        if advice:
            what += f"; {advice}"
        return what, known[-1].state != "CANCELLED"
    if not before:
        return None
    if any(folder.glob(f"slurm/{job_id}/*_log.out")) and not reason:
        what = f"job {job_id} ended{before}: see its log, and launch.setup"
        return what, True
    return f"{reason}job {job_id} ended{before}, and SLURM no longer says why", False


def _has_made_shards(folder: Path) -> bool:
    """Return True if the output of the newest data preparation has its manifest."""
    files = sorted(
        folder.glob("*/config-*.yaml"), key=lambda path: path.stat().st_mtime
    )
    with suppress(OSError, yaml.YAMLError, LookupError, TypeError):
        output = Path(yaml.safe_load(files[-1].read_text())["output"])
        return (output.expanduser() / "manifest.json").is_file()
    return False


def newest_log(folder: Path) -> Path | None:
    """The log of rank 0 that was written to last."""
    logs = [
        path for each in JOB_FOLDERS for path in folder.glob(f"{each}/*/*_0_log.out")
    ]
    return max(logs, key=lambda path: path.stat().st_mtime, default=None)


def _read_logged(run_folder: Path) -> LoggedProgress:
    """The run's journal and checkpoints. Missing files and unreadable lines count as not logged."""
    rows = [
        row
        for row in map(decode, last_lines(run_folder / JOURNAL_NAME))
        if row is not None
    ]
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


# ---- finding runs -----------------------------------------------------------------------------


def find_runs(names: Sequence[str]) -> list[Path]:
    """The run folders of each name: itself, or all below it; without names all below runs/.

    Raises UserErrors for every name that means none.
    """
    folders: list[Path] = []
    errors = []
    for name in map(os.path.expanduser, names or [str(RUNS_FOLDER)]):
        # A run may have the name of a folder of the code, such as "pretrain".
        places = [path for path in (Path(name), RUNS_FOLDER / name) if path.is_dir()]
        below = (list(_below(path, depth=MAX_DEPTH)) for path in places)
        try:
            found = next(filter(None, below), [])
        except PermissionError as error:
            errors.append(_not_readable(error))
            continue
        folders += found
        if not found:
            known = [
                str(p.relative_to(RUNS_FOLDER))
                for p in _below(RUNS_FOLDER, depth=MAX_DEPTH)
            ]
            otherwise = (
                "change to the folder that you started the run from, or name its output"
            )
            what = f"no run folder in {places[0]}" if places else f"no such run: {name}"
            errors.append(
                UserError(
                    what,
                    where="RUN",
                    allowed=f"a run folder, one with runs, or one of: {', '.join(known[:20])}",
                    next_step=did_you_mean(Path(name).name, known, otherwise),
                )
            )
    if errors:
        raise UserErrors(errors)
    return list(dict.fromkeys(folders))


def _not_readable(error: PermissionError) -> UserError:
    """The error for a run of somebody else."""
    path = Path(str(error.filename))
    return UserError(
        "cannot be read: a run folder is for its owner alone, unless the owner shares it",
        where=str(path),
        next_step=f"ask its owner for: chmod -R g+rX {quote(str(path.parent))}",
    )


def _below(folder: Path, *, depth: int) -> Iterator[Path]:
    """The folder if it is a run, else those in it."""
    found: list[Path] = []
    is_run = any((folder / name).is_file() for name in RUN_FILES)
    if not is_run and depth and folder.is_dir():
        # Copies of config.yaml are among the artifacts.
        skipped = (*JOB_FOLDERS, ARTIFACTS_FOLDER)
        inner = (
            path
            for path in folder.iterdir()
            if path.is_dir() and path.name not in skipped
        )
        found = [run for path in sorted(inner) for run in _below(path, depth=depth - 1)]
    yield from found
    if is_run or (not found and any((folder / name).is_dir() for name in JOB_FOLDERS)):
        yield folder


# ---- shown ------------------------------------------------------------------------------------


def as_text(runs: Sequence[RunStatus], *, now: float) -> str:
    """All runs, active ones first, and their number in each state."""
    ordered = sorted(
        runs, key=lambda run: (ORDER.index(run.state), -(run.since or 0.0))
    )
    lines = [line_of(run, now=now) for run in ordered]
    if len(runs) > 1:
        counts = Counter(run.state for run in runs)
        listed = ", ".join(
            f"{counts[state]} {state}" for state in ORDER if counts[state]
        )
        lines.append(f"{len(runs)} runs: {listed}")
    return "\n".join(lines)


def line_of(run: RunStatus, *, now: float) -> str:
    """Format one run: state, times, progress, speed, and the reason that it waits or failed.

    now: this machine's clock, for a run of which SLURM's is not known.
    """
    logged = run.logged
    now = run.seen or now
    length = "" if run.since is None else format_duration(now - run.since)
    at = f" at {_steps(run)}" if logged.step else ""
    ago = f", {length} ago" if length else ""
    if run.state is RunState.RUNNING:
        parts = [", ".join(_running(run, length, now=now)), run.place]
        if run.job is not None and run.job.state != "RUNNING":
            parts.append(waiting(run.job, now=now))
    elif run.job is not None:
        since = "" if run.since is None else f" since {clock(run.since)} ({length})"
        parts = [f"{run.state}{since}{at}: {waiting(run.job, now=now)}"]
    elif run.state is RunState.FINISHED:
        # The journal of an evaluation has image sizes as steps.
        has_steps = logged.step and not (run.folder / RESULTS_NAME).is_file()
        shown = list(logged.results.items())[:MAX_RESULTS]
        shown += [("train/loss", logged.loss)] if logged.loss is not None else []
        results = ", ".join(f"{name} {value:.4f}" for name, value in shown)
        parts = [
            "finished" + (f", {logged.step:,} steps" if has_steps else "") + ago,
            results,
        ]
    elif run.failure is not None:
        log = f"log {shown_folder(run.log)}" if run.log else ""
        parts = [f"{run.state}{at}{ago}: {run.failure.what}", log]
    elif run.state is RunState.STOPPED:
        why = f": {run.why}" if run.why else ""
        parts = [f"{run.state}{at}{ago}{why}", SUBMIT_AGAIN]
    else:
        parts = [f"{run.state}: {run.why}; submit it again" if run.why else run.state]
    if run.restarts:
        endings = ", ".join(
            f"{number} {ending}" for ending, number in run.restarts.items()
        )
        parts.append(f"restarted {sum(run.restarts.values())}x ({endings})")
    return f"{shown_folder(run.folder)}: {'; '.join(filter(None, parts))}"


def _running(run: RunStatus, length: str, *, now: float) -> Iterator[str]:
    logged = run.logged
    yield "running" + (f" for {length}" if length else "")
    # Both are of rank 0's clock; `run.since` may be of SLURM's.
    begun = run.since
    if run.attempt is not None and run.attempt.ended is None:
        begun = run.attempt.started
    if begun is not None and (logged.time is None or logged.time < begun):
        yield "starting" + (
            f" from step {logged.checkpoint_step:,}" * bool(logged.checkpoint_step)
        )
        return
    if logged.step:
        yield _steps(run)
    if logged.images_per_s is not None:
        yield f"{logged.images_per_s:,.0f} img/s"
    if logged.mfu is not None:
        yield f"MFU {logged.mfu:.1%}"
    if logged.time is None:
        return
    age = now - logged.time
    # No longer than the time from the start that has no steps: rank 0's clock may be slow.
    if run.since is not None and begun is not None:
        age = min(age, now - run.since - (logged.time - begun))
    if age > QUIET_S:
        yield f"last step {format_duration(age)} ago"
    # Its clock may be fast. A run that is late has no time left to show.
    if logged.eta_s is not None and logged.eta_s > max(0.0, age):
        yield f"{format_duration(logged.eta_s - max(0.0, age))} left"


def _steps(run: RunStatus) -> str:
    step, total = run.logged.step, run.logged.total_steps
    return (
        f"step {step:,}"
        if total is None
        else f"step {step:,} of {total:,} ({step / total:.0%})"
    )


def waiting(job: QueuedJob, *, now: float) -> str:
    """Explain why a job waits, with SLURM's own reason, and what to do or when it starts."""
    what, advice = why_it_waits(job)
    if job.start is not None and job.start > now and advice == BY_ITSELF:
        advice = f"expected to start at {clock(job.start)}"
    return f"job {job.job_id} {what}; {advice}"


def shown_folder(folder: Path) -> str:
    """The path, relative to the current folder where it is inside."""
    here = Path.cwd()
    absolute = folder.absolute()
    return str(
        absolute.relative_to(here) if absolute.is_relative_to(here) else absolute
    )


def format_size(num_bytes: float) -> str:
    """Three digits in units of a thousand, such as 293 kB or 1.5 GB."""
    size = num_bytes
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.0f} TB"


def clock(seconds: float) -> str:
    """Local time, with the date if it is not today."""
    moment, today = time.localtime(seconds), time.localtime()
    is_today = moment[:3] == today[:3]
    return time.strftime("%H:%M" if is_today else "%Y-%m-%d %H:%M", moment)


# ---- following one run --------------------------------------------------------------------------


def follow_run(folder: Path) -> int:
    """Show the run's log and states until nothing runs or waits. Returns its exit code.

    0: finished; 75: not, and can be resumed; that of the failure's kind. 130 after
    Ctrl-C, which leaves the run alone. Raises UserError for an array, whose tasks have own logs.
    """
    run, tail, shown = read_state(folder, known_jobs()), None, None
    if run.job is not None and "_" in run.job.job_id:
        raise UserError(
            f"{shown_folder(folder)} has a job of several tasks, each with its own log",
            where="--follow",
            next_step=f"vitscale status {quote(shown_folder(folder))}",
        )
    try:
        while True:
            path = newest_log(folder)
            if path is not None and (tail is None or tail.path != path):
                tail = LogTail(path, last_lines=LAST_LINES if shown is None else None)
            if tail is not None:
                tail.copy()
            # SLURM's estimate of the start changes all the time.
            reason = (
                run.job.reason
                if run.job and run.state is not RunState.RUNNING
                else None
            )
            if shown != (shown := (run.state, reason, run.job and run.job.job_id)):
                print(line_of(run, now=time.time()), flush=True)
            if run.state not in ACTIVE:
                break
            time.sleep(FOLLOW_SECONDS)
            jobs = known_jobs()
            # SLURM, which has the job, may not answer.
            if jobs is not None or run.job is None:
                run = read_state(folder, jobs)
    except KeyboardInterrupt:
        job = run.job
        what = (
            f"job {job.job_id} continues; scancel {job.job_id} ends it"
            if job
            else "it goes on"
        )
        again = f"vitscale status {quote(shown_folder(folder))} --follow"
        print(f"\n{what}\nfollow it again: {again}")
        return EXIT_INTERRUPTED
    if run.failure is not None:
        return run.failure.kind.exit_code
    return 0 if run.state is RunState.FINISHED else EXIT_STOPPED_RESUMABLE
