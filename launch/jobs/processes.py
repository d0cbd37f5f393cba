"""Run a stage on this machine: its ranks as processes, rank 0 shown, nobody left.

Owns: starting the ranks, their logs, stop signals, the end of all when one has failed, and the exit
code.
Leaves out: what the ranks run (`StageJob`).
"""

from __future__ import annotations

import codecs
import os
import shlex
import signal
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil  # noqa: F401  # for `descendants`, which may be needed while storage is gone

from launch.jobs.attempts import (
    Ending,
    Outcome,
    begin_attempt,
    end_attempt,
    ended_with,
    failure_outcome,
)
from launch.jobs.submission import StageJob
from vitscale.config.errors import (
    EXIT_FAILED,
    EXIT_STOPPED_RESUMABLE,
    FailureKind,
    UserError,
)
from vitscale.config.loader import SITE_VARIABLE
from vitscale.distributed.events import ATTEMPT_VARIABLE, Failure
from vitscale.distributed.processes import (
    descendants,
    free_port,
    launcher_variables,
    node_name,
)

POLL_SECONDS = 0.1
# After one rank failed, the others have this long to end by themselves, and to say why.
GRACE_SECONDS = 5.0
LAST_LINES = 40
EXIT_INTERRUPTED = 130
# Inside a SLURM job, ranks would otherwise take themselves for its tasks.
SLURM_PREFIXES = ("SLURM", "SUBMITIT")


class StopFlag:
    """Set by SIGTERM, SIGUSR2 and the end of the terminal. Create it before the ranks start."""

    def __init__(self) -> None:
        self.is_set = False
        for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # by nohup
                signal.signal(number, self._set)

    def _set(self, number: int, _: object) -> None:
        self.is_set = True
        for output in (1, 2) if number == signal.SIGHUP else ():
            if stat.S_ISCHR(
                os.fstat(output).st_mode
            ):  # writing to a lost terminal fails
                os.dup2(os.open(os.devnull, os.O_WRONLY), output)


class LogTail:
    """Prints new content of a log on every call of `copy`; at first at most `last_lines`."""

    def __init__(self, path: Path, *, last_lines: int | None = None) -> None:
        self.path = path
        self.position = 0
        # A character may be written in two parts.
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        if last_lines is not None:
            lines = path.read_bytes().splitlines(True)
            self.position = sum(map(len, lines[:-last_lines]))

    def copy(self) -> None:
        try:
            with open(self.path, "rb") as file:
                file.seek(self.position)
                added = file.read()
        except FileNotFoundError:
            # Its process has not opened it yet.
            return
        self.position += len(added)
        print(self.decoder.decode(added), end="", flush=True)


Rank = subprocess.Popen[bytes]


def log_of(rank: int, folder: Path) -> Path:
    return folder / f"rank_{rank}_log.out"


def run_here(
    job: StageJob, *, python: str | None, num_procs: int, stop: StopFlag
) -> int:
    """Run the job to its end and return its exit code. SIGTERM stops it with a checkpoint.

    python: interpreter command; None: this interpreter. Logs are in a folder beside the config.
    num_procs: its ranks; a data preparation is one process, which uses all cores.
    Ctrl-C ends it at once. No process is left, however this ends.
    """
    num_procs = num_procs if job.run_folder else 1
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:8]}"
    folder = Path(job.config).parent / name
    folder.mkdir(mode=0o700)
    run_folder = job.run_folder or folder
    ranks: list[Rank] = []
    failed: int | None = None
    attempt = begin_attempt(
        run_folder, cluster="local", job_id=name, nodes=[node_name()]
    )
    outcome = Outcome(
        ending=Ending.FAILED, reason="the launcher ended", exit_code=EXIT_FAILED
    )
    try:
        print(f"running {num_procs} process(es); logs in {folder}", flush=True)
        dropped = launcher_variables()
        if dropped:
            print(
                f"{', '.join(dropped)} of the environment not used: all ranks are here",
                flush=True,
            )
        environment = {
            each: value
            for each, value in os.environ.items()
            if not each.startswith(SLURM_PREFIXES) and each not in dropped
        }
        environment |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(num_procs),
            "LOCAL_WORLD_SIZE": str(num_procs),
            ATTEMPT_VARIABLE: name,
            # The configuration is complete; a site file must not change it.
            SITE_VARIABLE: "",
        }
        command = [
            *(shlex.split(python) if python else [sys.executable]),
            "-u",
            *job.arguments,
        ]
        for number in range(num_procs):
            ranks.append(_start(job, command, number, folder, environment))
        failed = _follow(ranks, log_of(0, folder), stop)
        if failed is not None:
            code = ranks[failed].returncode
            seen = ended_with(f"rank {failed}", code)
            if code < 0:
                what = f"rank {failed} was killed ({signal.Signals(-code).name})"
                kind, node = FailureKind.KILLED, node_name()
                seen = Failure(kind=kind, what=what, rank=failed, node=node)
            outcome = failure_outcome(seen, run_folder, attempt=name)
        elif any(rank.returncode for rank in ranks):
            reason, code = "stopped by a signal", EXIT_STOPPED_RESUMABLE
            outcome = Outcome(ending=Ending.STOPPED, reason=reason, exit_code=code)
        else:
            outcome = Outcome(ending=Ending.DONE, reason="done", exit_code=0)
    except KeyboardInterrupt:
        # A second Ctrl-C would leave processes running.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        reason = "interrupted by Ctrl-C"
        outcome = Outcome(
            ending=Ending.STOPPED, reason=reason, exit_code=EXIT_INTERRUPTED
        )
        with suppress(OSError):
            print("\ninterrupted: ending all processes", file=sys.stderr, flush=True)
    finally:
        _kill(ranks)
        end_attempt(attempt, run_folder, outcome)
    if outcome.exit_code == EXIT_STOPPED_RESUMABLE:
        print("stopped; the same command resumes the run", flush=True)
    elif failed is not None:
        culprit = failed if outcome.failed_rank is None else outcome.failed_rank
        report = _report(outcome.reason, culprit, log_of(culprit, folder))
        print(report, file=sys.stderr, flush=True)
    return outcome.exit_code


def _start(
    job: StageJob,
    command: Sequence[str],
    rank: int,
    folder: Path,
    environment: dict[str, str],
) -> Rank:
    # Without a buffer, the rank writes behind what is written here.
    with open(log_of(rank, folder), "ab", buffering=0) as log:
        if rank == 0:
            log.write(f"{job.heading(int(environment['WORLD_SIZE']))}\n".encode())

        try:
            return subprocess.Popen(
                command,
                env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C in a terminal reaches this process alone.
                start_new_session=True,
            )
        except OSError as error:
            what = f"{command[0]!r} cannot be started ({error.strerror})"
            raise UserError(what, where="launch.python") from None


def _kill(ranks: Sequence[Rank]) -> None:
    """Kill the running ranks and all their descendants."""
    for rank in ranks:
        if rank.poll() is None:
            for pid in (*descendants(rank.pid), rank.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            rank.wait()


def _follow(ranks: Sequence[Rank], log: Path, stop: StopFlag) -> int | None:
    """Show the log of rank 0 until all ranks have ended. Returns the first that failed.

    A code below 0 is the signal that ended a rank.
    """
    tail = LogTail(log)
    failed: int | None = None
    deadline = float("inf")
    is_forwarded = False
    is_running = True
    while is_running:
        tail.copy()
        if stop.is_set and not is_forwarded:
            is_forwarded = True
            for rank in ranks:
                rank.terminate()
        codes = [rank.poll() for rank in ranks]
        is_running = None in codes
        # A rank that does not handle the stop signal yet is killed by it, which is no failure.
        fine = (
            None,
            0,
            EXIT_STOPPED_RESUMABLE,
            *((-signal.SIGTERM,) if stop.is_set else ()),
        )
        if failed is None:
            failed = next(
                (number for number, code in enumerate(codes) if code not in fine), None
            )
        # Others may still save when one has stopped as asked.
        if any(code not in (None, 0, EXIT_STOPPED_RESUMABLE) for code in codes):
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        # It came from outside, so no other rank could name a better cause.
        if -signal.SIGKILL in codes:
            deadline = 0.0
        if time.monotonic() > deadline:
            _kill(ranks)
            break
        time.sleep(POLL_SECONDS * is_running)
    tail.copy()
    return failed


def _report(reason: str, rank: int, log: Path) -> str:
    """The cause, and the last log lines of its rank if it is not shown."""
    lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
    text = f"{reason}; log of rank {rank}: {log}"
    return "\n".join([text, *(f"  {line}" for line in lines if rank)])
