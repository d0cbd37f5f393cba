"""Run a stage on this machine: its ranks as processes, rank 0 shown, nobody left.

Owns: starting the ranks, their logs, stop signals, the end of all when one has failed, and the exit
code.
Leaves out: what the ranks run (`StageJob`).
"""

from __future__ import annotations

import codecs
import fcntl
import os
import shlex
import signal
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil  # noqa: F401  # for `kill_children`, which may be needed while storage is gone

from launch.jobs.attempts import (
    Attempt,
    Ending,
    Outcome,
    begin_attempt,
    end_attempt,
    ended_with,
    failure_outcome,
)
from launch.jobs.submission import StageJob
from vitscale.config.errors import (
    EXIT_CODES,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_STOPPED_RESUMABLE,
    FailureKind,
    UserError,
    interrupts_deferred,
    print_note,
)
from vitscale.config.loader import SITE_VARIABLE
from vitscale.distributed.events import ATTEMPT_VARIABLE, Failure
from vitscale.distributed.processes import (
    free_port,
    kill_children,
    launcher_variables,
    node_name,
)
from vitscale.tracking.mlflow_sync import Status, close_run

POLL_SECONDS = 0.1
# After one rank failed, the others have this long to end by themselves, and to say why.
GRACE_SECONDS = 5.0
LAST_LINES = 40
# Inside a SLURM job, ranks would otherwise take themselves for its tasks.
SLURM_PREFIXES = ("SLURM", "SUBMITIT")


class StopFlag:
    """Set by SIGTERM, SIGUSR2, the end of the terminal and, while ranks run, Ctrl-C.

    Create it before the ranks start.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        """What the ranks are to get; None: they may go on."""
        self._take(signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP)

    def _take(self, *numbers: signal.Signals) -> None:
        for number in numbers:
            # Background jobs of a shell ignore Ctrl-C, and those of nohup SIGHUP.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._set)

    @contextmanager
    def interrupts(self) -> Iterator[None]:
        """Take a first Ctrl-C as a stop inside the block; a second one is a KeyboardInterrupt."""
        before = signal.getsignal(signal.SIGINT)
        self._take(signal.SIGINT)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _set(self, number: int, _: object) -> None:
        if number == self.signal == signal.SIGINT:
            # A third one would leave processes running.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            raise KeyboardInterrupt
        if number == signal.SIGINT:
            self.signal = signal.SIGINT
        elif self.signal is None:
            self.signal = signal.SIGTERM
        for output in (1, 2) if number == signal.SIGHUP else ():
            if stat.S_ISCHR(
                os.fstat(output).st_mode
            ):  # writing to a lost terminal fails
                os.dup2(os.open(os.devnull, os.O_WRONLY), output)


Rank = subprocess.Popen[bytes]


def log_of(rank: int, folder: Path) -> Path:
    return folder / f"rank_{rank}_log.out"


@contextmanager
def one_launcher(job: StageJob) -> Iterator[None]:
    """Hold the job's folder inside the block, if its processes are ranks of one run.

    Raises UserError, before anything is recorded, where another job has the run folder.
    """
    # Tasks of a data preparation share their output, and may be many.
    if job.run_folder is None:
        yield
        return
    held = Path(job.run_folder, ".lock")
    if held.exists():
        # Of a rank, also of one that no launcher has started. The ranks of this job will lock it.
        os.close(_locked(held, holder=held.read_text(errors="replace").strip()))
    descriptor = _locked(Path(job.config).parent)
    try:
        yield
    finally:
        os.close(descriptor)


def _locked(path: Path, *, holder: str = "") -> int:
    """Open and lock a path. Raises UserError where another process has locked it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        what = "another job is training in this run folder"
        if holder:
            what += f": {holder}"
        step = "wait for it or stop it, or choose another name"
        raise UserError(what, where=path.parent, next_step=step) from None
    except OSError:  # not on this file system: the ranks will find it out
        pass
    return descriptor


def run_here(
    job: StageJob, *, python: str | None, num_procs: int, stop: StopFlag
) -> int:
    """Run the job to its end and return its exit code.

    SIGTERM and a first Ctrl-C stop it with a checkpoint; a second Ctrl-C kills it. No process is
    left, however this ends.

    python: interpreter command; None: this interpreter. Logs are in a folder beside the config.
    num_procs: its ranks; a data preparation is one process, which uses all cores.
    Raises UserError, before anything is recorded, where another job has the run folder.
    """
    num_procs = num_procs if job.run_folder else 1
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:8]}"
    folder = Path(job.config).parent / name
    run_folder = Path(job.run_folder or folder)
    ranks: list[Rank] = []
    # What is recorded if an error of this process itself ends the attempt.
    outcome = Outcome(
        ending=Ending.FAILED, reason="the launcher ended", exit_code=EXIT_FAILED
    )
    with one_launcher(job):
        folder.mkdir(mode=0o700)
        attempt = begin_attempt(
            run_folder, cluster="local", job_id=name, nodes=[node_name()]
        )
        with stop.interrupts():
            try:
                environment = _environment(name, num_procs)
                print(f"running {num_procs} process(es); logs in {folder}", flush=True)
                command = [*(shlex.split(python or "") or [sys.executable]), "-u"]
                command += job.arguments
                for number in range(num_procs):
                    ranks.append(_start(job, command, number, folder, environment))
                failed = _follow(ranks, log_of(0, folder), stop)
                outcome = _outcome(ranks, failed, stop, run_folder, name)
            except KeyboardInterrupt:
                outcome = Outcome(
                    ending=Ending.STOPPED,
                    reason="killed by Ctrl-C",
                    exit_code=EXIT_INTERRUPTED,
                )
            finally:
                _kill(ranks)
                ended = end_attempt(attempt, run_folder, outcome)
        # A stop before the first step has nothing to resume from.
        if ended.ending is Ending.STOPPED:
            text = "stopped; the same command starts the run again"
            if ended.checkpoint_step:
                kept = f"{ended.checkpoint_step:,} steps are kept"
                text = f"stopped: {kept}; the same command resumes the run"
            print(text, flush=True)
        elif ended.ending is Ending.FAILED:
            report = _report(ended, log_of(ended.failed_rank or 0, folder))
            print_note(report)

        # A rank that was killed could not say it.
        status: Status = "FAILED" if ended.ending is Ending.FAILED else "KILLED"
        close_run(run_folder, status, say=print)
    return outcome.exit_code


def _environment(attempt: str, num_procs: int) -> dict[str, str]:
    """The variables that all ranks have, and none of another job."""
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
    return environment | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(num_procs),
        "LOCAL_WORLD_SIZE": str(num_procs),
        ATTEMPT_VARIABLE: attempt,
        # The configuration is complete; a site file must not change it.
        SITE_VARIABLE: "",
    }


def _outcome(
    ranks: Sequence[Rank], failed: int | None, stop: StopFlag, folder: Path, name: str
) -> Outcome:
    """How the ranks ended. failed: the first that failed. folder, name: of run and attempt."""
    if failed is not None:
        code = ranks[failed].returncode
        seen = ended_with(f"rank {failed}", code)
        if code < 0:
            what = f"rank {failed} was killed ({signal.Signals(-code).name})"
            seen = Failure(kind=FailureKind.KILLED, what=what)
        seen = replace(seen, rank=failed, node=node_name())
        return failure_outcome(seen, folder, attempt=name)

    codes = {rank.returncode for rank in ranks}
    if codes == {0}:
        return Outcome(ending=Ending.DONE, reason="done", exit_code=0)
    # Ranks that were not in their loop yet have nothing to save.
    reason, code = "stopped by a signal", EXIT_STOPPED_RESUMABLE
    if stop.signal is signal.SIGINT and EXIT_STOPPED_RESUMABLE not in codes:
        reason, code = "stopped by Ctrl-C", EXIT_INTERRUPTED
    return Outcome(ending=Ending.STOPPED, reason=reason, exit_code=code)


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
            with interrupts_deferred():
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
            kill_children(rank.pid)
            rank.kill()
            rank.wait()


def _follow(ranks: Sequence[Rank], log: Path, stop: StopFlag) -> int | None:
    """Show the log of rank 0 until all ranks have ended. Returns the first that failed.

    A code below 0 is the signal that ended a rank.
    """
    failed: int | None = None
    deadline = float("inf")
    forwarded: signal.Signals | None = None
    is_running = True

    # `_start` has made the log. A reader keeps a character of which only a part is written.
    with codecs.getreader("utf-8")(open(log, "rb"), "replace") as shown:
        while is_running:
            print(shown.read(), end="", flush=True)
            if stop.signal is not None and stop.signal is not forwarded:
                forwarded = stop.signal
                for rank in ranks:
                    rank.send_signal(forwarded)
                if forwarded is signal.SIGINT:
                    print(
                        "\nstopping after a checkpoint; Ctrl-C again kills", flush=True
                    )
            codes = [rank.poll() for rank in ranks]
            is_running = None in codes
            # A rank that is not in its loop yet is ended by the stop signal, which is no failure.
            fine = {None, 0, EXIT_STOPPED_RESUMABLE}
            if forwarded is not None:
                fine |= {-signal.SIGTERM, -signal.SIGINT, EXIT_INTERRUPTED}
            if failed is None:
                failed = next(
                    (number for number, code in enumerate(codes) if code not in fine),
                    None,
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
        print(shown.read(), end="", flush=True)
    return failed


def _report(ended: Attempt, log: Path) -> str:
    """The cause, and the last log lines of its rank if it is not shown."""
    rank = ended.failed_rank or 0
    # Rank 0, whose log is shown, has printed errors of these kinds itself.
    is_shown = not rank and ended.kind in EXIT_CODES
    reason = f"failed ({ended.kind})" if is_shown else ended.reason
    lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
    text = f"{reason}; log of rank {rank}: {log}"
    return "\n".join([text, *(f"  {line}" for line in lines if rank)])
