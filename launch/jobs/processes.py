"""Run a stage on this machine: its ranks as processes, rank 0 shown, nobody left.

Owns: starting the ranks, their logs, stop signals, the end of all when one has failed, and the exit
code.
Leaves out: what the ranks run (`StageJob`).
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from launch.jobs.attempts import Ending, Outcome, begin_attempt, end_attempt
from launch.jobs.outcomes import failure_outcome, kind_of_exit_code
from launch.jobs.task import StageJob
from vitscale.config.errors import EXIT_FAILED, EXIT_STOPPED_RESUMABLE, FailureKind
from vitscale.config.loader import SITE_VARIABLE
from vitscale.distributed.events import ATTEMPT_VARIABLE, Failure, cause, read_failures
from vitscale.distributed.processes import descendants, free_port, node_name

POLL_SECONDS = 0.1
# After one rank failed or was killed, the others have this long to end by themselves.
GRACE_SECONDS = 5.0
LAST_LINES = 40
EXIT_INTERRUPTED = 130
# Inside a SLURM job, ranks would otherwise take themselves for its tasks.
SLURM_PREFIXES = ("SLURM", "SUBMITIT")


class StopFlag:
    """Set by SIGTERM and SIGUSR2. Create it before the ranks start, or a signal can be missed."""

    def __init__(self) -> None:
        self.is_set = False
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, self._set)

    def _set(self, *_: object) -> None:
        self.is_set = True


class LogTail:
    """Copies new content of a log on every call of `copy`."""

    def __init__(self, path: Path, *, output: TextIO) -> None:
        self.path, self.output, self.position = path, output, 0

    def copy(self) -> None:
        try:
            with open(self.path, "rb") as file:
                file.seek(self.position)
                added = file.read()
        except FileNotFoundError:
            return  # not opened yet
        self.position += len(added)
        self.output.write(added.decode(errors="replace"))
        self.output.flush()


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """A process of the job."""

    number: int
    process: subprocess.Popen[bytes]
    log: Path

    def has_failed(self, *, stopping: bool) -> bool:
        """A rank that does not handle the stop signal yet is killed by it, which is no failure."""
        code = self.process.poll()
        is_stopped = stopping and code == -signal.SIGTERM
        return code not in (None, 0, EXIT_STOPPED_RESUMABLE) and not is_stopped

    def kill(self) -> None:
        """End it, and all that it has started."""
        if self.process.poll() is None:
            for pid in (*descendants(self.process.pid), self.process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()


def run_here(
    job: StageJob, *, python: str | None, num_procs: int, folder: Path, stop: StopFlag
) -> int:
    """Run the job to its end and return its exit code. SIGTERM stops it with a checkpoint.

    python: interpreter command; None: this interpreter. folder: gets a folder with the logs.
    Ctrl-C ends it at once. No process is left, however this ends.
    """
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:8]}"
    folder = folder / name
    folder.mkdir(mode=0o700)
    ranks: list[Rank] = []
    failed: Rank | None = None
    attempt = None
    if job.run_folder is not None:
        attempt = begin_attempt(job.run_folder, cluster="local", job_id=name, nodes=(node_name(),))
    outcome = Outcome(ending=Ending.FAILED, reason="the launcher ended", exit_code=EXIT_FAILED)
    try:
        print(f"running {num_procs} process(es); logs in {folder}", flush=True)
        environment = {
            each: value for each, value in os.environ.items() if not each.startswith(SLURM_PREFIXES)
        }
        environment |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            ATTEMPT_VARIABLE: name,
            # The configuration is complete; a site file must not change it.
            SITE_VARIABLE: "",
        }
        command = [*(shlex.split(python) if python else [sys.executable]), "-u", *job.arguments]
        for number in range(num_procs):
            ranks.append(_start(job, command, number, num_procs, folder, environment))
        failed = _follow(ranks, independent=job.independent, stop=stop)
        outcome = _outcome(ranks, failed, job.run_folder, attempt=name, stop=stop)
    except KeyboardInterrupt:
        # A second Ctrl-C would leave processes running.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        reason = "interrupted by Ctrl-C"
        outcome = Outcome(ending=Ending.STOPPED, reason=reason, exit_code=EXIT_INTERRUPTED)
        with suppress(OSError):
            print("\ninterrupted: ending all processes", file=sys.stderr, flush=True)
    finally:
        for rank in ranks:
            rank.kill()
        if attempt is not None and job.run_folder is not None:
            end_attempt(attempt, job.run_folder, outcome)
    if outcome.exit_code == EXIT_STOPPED_RESUMABLE:
        print("stopped; the same command resumes the run", flush=True)
    elif failed is not None:
        print(_report(ranks, failed, job, attempt=name), file=sys.stderr, flush=True)
        if attempt is not None:
            print(f"cause: {outcome.reason}", file=sys.stderr, flush=True)
    return outcome.exit_code


def _start(
    job: StageJob,
    command: Sequence[str],
    number: int,
    num_procs: int,
    folder: Path,
    environment: dict[str, str],
) -> Rank:
    rank, world_size, tasks = str(number), str(num_procs), f"{num_procs} task(s)"
    if job.independent:
        # A job of its own, as in an array.
        rank, world_size, tasks = "0", "1", f"task {number} ({num_procs} in total)"
    environment = environment | {"RANK": rank, "LOCAL_RANK": rank}
    environment |= {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    path = folder / f"rank_{number}_log.out"
    with open(path, "ab", buffering=0) as log:
        if rank == "0":
            log.write(f"{job.heading(tasks)}\n".encode())
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # Ctrl-C in a terminal reaches this process alone.
            start_new_session=True,
        )
    return Rank(number=number, process=process, log=path)


def _follow(ranks: Sequence[Rank], *, independent: bool, stop: StopFlag) -> Rank | None:
    """Show rank 0's log until all ranks have ended. Returns the first that failed."""
    tail = LogTail(ranks[0].log, output=sys.stdout)
    failed: Rank | None = None
    deadline = float("inf")
    is_forwarded = False
    while any(rank.process.poll() is None for rank in ranks):
        tail.copy()
        if stop.is_set and not is_forwarded:
            is_forwarded = True
            for rank in ranks:
                rank.process.terminate()
        failed = failed or _first_failed(ranks, stop)
        # Others may still save when one has stopped as asked.
        has_gone = any(rank.has_failed(stopping=False) for rank in ranks)
        if has_gone and not independent:
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if time.monotonic() > deadline:
            # What they are ended with now is not their failure.
            failed = failed or _first_failed(ranks, stop)
            for rank in ranks:
                rank.kill()
            tail.copy()
            return failed
        time.sleep(POLL_SECONDS)
    tail.copy()
    return failed or _first_failed(ranks, stop)


def _first_failed(ranks: Sequence[Rank], stop: StopFlag) -> Rank | None:
    return next((rank for rank in ranks if rank.has_failed(stopping=stop.is_set)), None)


def _outcome(
    ranks: Sequence[Rank],
    failed: Rank | None,
    run_folder: str | None,
    *,
    attempt: str,
    stop: StopFlag,
) -> Outcome:
    codes = [rank.process.poll() or 0 for rank in ranks]
    if failed is None:
        if EXIT_STOPPED_RESUMABLE in codes or (stop.is_set and any(codes)):
            reason, code = "stopped by a signal", EXIT_STOPPED_RESUMABLE
            return Outcome(ending=Ending.STOPPED, reason=reason, exit_code=code)
        return Outcome(ending=Ending.DONE, reason="done", exit_code=0)
    code = codes[failed.number]
    who = f"rank {failed.number}"
    seen = Failure(kind=kind_of_exit_code(code), what=f"{who} ended with code {code}")
    if code < 0:
        what = f"{who} was killed ({signal.Signals(-code).name})"
        seen = Failure(kind=FailureKind.KILLED, what=what, rank=failed.number, node=node_name())
    if run_folder is None:
        exit_code = seen.kind.exit_code
        return Outcome(ending=Ending.FAILED, reason=seen.what, exit_code=exit_code, kind=seen.kind)
    return failure_outcome(seen, run_folder, attempt=attempt)


def _report(ranks: Sequence[Rank], failed: Rank, job: StageJob, *, attempt: str) -> str:
    """How the rank ended that caused the failure, and its last log lines if it is not shown."""
    reports = read_failures(job.run_folder, attempt=attempt) if job.run_folder else []
    found = cause(reports)
    if found is not None and found.rank is not None and found.rank < len(ranks):
        failed = ranks[found.rank]
    code = failed.process.poll() or 0
    how = "was killed" if code < 0 else f"ended with code {code}"
    heading = f"rank {failed.number} {how}; log: {failed.log}"
    if failed.number == 0:
        return heading
    lines = failed.log.read_text(errors="replace").splitlines()[-LAST_LINES:]
    return "\n".join([heading, *(f"  {line}" for line in lines)])
