"""Share units of work among processes on several machines, through a folder.

Owns: the work folder `.OUTPUT.preparing`, claims and their heartbeat, the worker processes of one
task, their errors, signals and progress.
Leaves out: what a unit does (the other modules of this package).

A unit is named after the file that it makes, is done if that file exists, and makes the same bytes
in any process. So a claim only saves work: two processes may do the same unit. Every process of
every task runs the same loop: do the free units of a step, wait until the others have done theirs,
go on with the next step. No process is special, so any may die or start late.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import threading
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pyarrow as pa

from data_prep.sources.errors import ChangedSource, Outage, check_is_mounted
from data_prep.sources.protocol import source_root
from vitscale.config.errors import EXIT_STOPPED_RESUMABLE, UserError
from vitscale.data.index import MANIFEST_NAME
from vitscale.distributed.fork_server import end_with_server, worker_context
from vitscale.distributed.processes import is_alive, num_cores
from vitscale.runs.data_prep import DataPrepRun
from vitscale.tracking.console import item_progress

FAILED_NAME = "failed.json"
FOLDERS = ("claims", "list", "spool", "tars", "tmp")
HEARTBEAT_NAME, HEARTBEAT_S = "alive", 5.0
# A process of another machine is dead when its heartbeat is this old by the file system's clock.
DEAD_AFTER_S = 60.0
# Pauses start short, since most waits are, and grow: no pause is longer than a quarter of the wait.
FIRST_WAIT_S, WAIT_GROWTH, LONGEST_WAIT_S = 0.005, 1.25, 1.0
UPDATE_S = 0.5
# A worker that waits for dead storage does not end when it is killed.
EXIT_WAIT_S = 5.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
USE_LESS_MEMORY = "lower num_workers or images.max_pixels and rerun; the run resumes"
# What workers need, and what pyarrow imports at first use: 0.3 s and 45 MiB in each of them.
IMPORTS = (
    "data_prep.steps.finish",
    "pandas",
    "pyarrow.compute",
    "pyarrow.parquet",
    "PIL.JpegImagePlugin",
)


class WorkFolder:
    """The view of one process on the folder of a run's unfinished work."""

    def __init__(self, run: DataPrepRun) -> None:
        self.run = run
        self.output = Path(run.output).expanduser()
        self.path = self.output.with_name(f".{self.output.name}.preparing")
        self.scratch = self.path / "tmp" / this_process()
        """Unfinished files of this process; renamed to their place when whole."""

    @property
    def is_finished(self) -> bool:
        return (self.output / MANIFEST_NAME).exists()

    def open(self) -> None:
        """Create the folders, start the heartbeat, and remove what dead processes left.

        Raises FileNotFoundError if the work folder is gone: another process finished the work.
        """
        for name in FOLDERS:
            (self.path / name).mkdir(exist_ok=True)
        for left in (self.path / "tmp").iterdir():
            if self.is_dead(left.name, elsewhere=False):
                shutil.rmtree(left, ignore_errors=True)
        self.scratch.mkdir(exist_ok=True)
        (self.scratch / HEARTBEAT_NAME).touch()
        threading.Thread(target=_beat, args=(self.scratch / HEARTBEAT_NAME,), daemon=True).start()

    def temporary(self, name: str) -> Path:
        """A new name for an unfinished file or folder."""
        return self.scratch / f"{name}.{uuid.uuid4().hex[:8]}"

    def is_done(self, unit: str) -> bool:
        return (self.path / unit).exists() or self.is_finished

    def work_through(
        self, units: Sequence[str], do: Callable[[WorkFolder, str], None], *, start: int
    ) -> None:
        """Return when every unit is done, by this process or another.

        start: the unit to begin with, so that processes do not all try the same claims first.
        Raises FileNotFoundError if the folder is removed meanwhile.
        """
        first = start % max(1, len(units))
        waiting = [unit for unit in (*units[first:], *units[:first]) if not self.is_done(unit)]
        pause = FIRST_WAIT_S
        while waiting:
            progressed = False
            for unit in waiting:
                claim = self.path / "claims" / unit.replace("/", "-")
                if self.is_done(unit) or not self.take(claim):
                    continue
                try:
                    if not self.is_done(unit):
                        do(self, unit)
                        progressed = True
                finally:
                    claim.unlink(missing_ok=True)
            waiting = [unit for unit in waiting if not self.is_done(unit)]
            if waiting and not progressed:
                if not self.path.exists() and not self.is_finished:
                    raise FileNotFoundError(errno.ENOENT, "it was removed", str(self.path))
                time.sleep(pause)
                pause = min(WAIT_GROWTH * pause, LONGEST_WAIT_S)

    def take(self, claim: Path) -> bool:
        """Make a claim, a link that names this process. False: another one has it.

        That of a dead process is removed, for the next attempt.
        """
        with suppress(FileNotFoundError):
            try:
                os.symlink(self.scratch.name, claim)
                return True
            except FileExistsError:
                if self.is_dead(os.readlink(claim)):
                    claim.unlink()
        return False

    def is_dead(self, owner: str, *, elsewhere: bool = True) -> bool:
        """Whether a process has ended. elsewhere: look at heartbeats from other machines."""
        where, _, pid = owner.rpartition(".")
        if where == machine():
            return not is_alive(int(pid))
        if not elsewhere:
            return False
        try:
            # Opened: network file systems then ask the server for its time of change.
            with open(self.path / "tmp" / owner / HEARTBEAT_NAME) as file:
                beat = os.fstat(file.fileno()).st_mtime
        except FileNotFoundError:
            return True
        own = self.scratch / HEARTBEAT_NAME
        own.touch()
        return own.stat().st_mtime - beat > DEAD_AFTER_S

    def failure(self) -> dict[str, Any] | None:
        """The error that ended the work for all tasks, with the job of the task that met it."""
        try:
            found: dict[str, Any] = json.loads((self.path / FAILED_NAME).read_text())
        except FileNotFoundError:
            return None
        return found

    def raise_failure(self) -> None:
        failure = self.failure()
        if failure is not None:
            raise UserError(failure["text"])


@cache
def machine() -> str:
    """Name of the machine and its process id namespace: containers may share their host's name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
        return f"{socket.gethostname()}-{boot}-{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()


def this_process() -> str:
    """A name unique among the running processes of all machines."""
    return f"{machine()}.{os.getpid()}"


def _beat(path: Path) -> None:
    while path.parent.exists():
        time.sleep(HEARTBEAT_S)
        with suppress(OSError):
            path.touch()


@dataclass(frozen=True)
class Step:
    """One step of the work. Its functions are module-level: workers get them by name."""

    title: str
    units: Callable[[WorkFolder], Sequence[str]]
    """Names of the files to make, relative to the work folder, known after the step before."""
    do: Callable[[WorkFolder, str], None]
    """Make one of them, with the same bytes in any process."""
    images: Callable[[WorkFolder], Sequence[int]] | None = None
    """Images in each unit, which progress counts instead of units."""
    check: Callable[[WorkFolder, Sequence[str]], None] | None = None
    """Raise UserError if the units done so far show that the work is in vain."""


def run_steps(work: WorkFolder, steps: Sequence[Step]) -> None:
    """Work through the steps in this task's processes; return when any tasks have finished them.

    Raises Outage where a rerun resumes, UserError for a corpus that cannot be used,
    SystemExit(75) after a stop signal.
    """
    num_workers = work.run.num_workers or num_cores()
    task = int(os.environ.get("SLURM_ARRAY_TASK_ID") or os.environ.get("RANK") or 0)
    context = worker_context(IMPORTS)
    errors: Any = context.SimpleQueue()
    workers: list[Any] = [
        context.Process(
            target=_run_worker,
            args=(work.run, tuple(steps), errors, task * num_workers + number),
            daemon=True,
        )
        for number in range(num_workers)
    ]
    previous = {number: signal.signal(number, _stop) for number in STOP_SIGNALS}
    try:
        work.open()
        for worker in workers:
            worker.start()
        for step in steps:
            _follow(work, step, workers, errors)
        while any(worker.exitcode is None for worker in workers):
            _wait(work, workers, errors)
    except (OSError, pa.ArrowException) as error:
        # Another task may have finished the work, and removed the folder.
        if not work.is_finished:
            raise storage_error(error, work) from None
    finally:
        started = [worker for worker in workers if worker.pid is not None]
        for worker in started:
            worker.kill()
        for worker in started:
            worker.join(EXIT_WAIT_S)
        for number, handler in previous.items():
            if signal.getsignal(number) is _stop:
                signal.signal(number, handler)


def _stop(*_: object) -> None:
    for number in STOP_SIGNALS:
        # A second signal must not kill a process that is stopping.
        signal.signal(number, signal.SIG_IGN)
    print("\nstopped; run the same command again to resume", flush=True)
    raise SystemExit(EXIT_STOPPED_RESUMABLE)


def _follow(work: WorkFolder, step: Step, workers: list[Any], errors: Any) -> None:
    """Show the progress of one step until all of its units are done."""
    if work.is_finished:
        return
    units, done = step.units(work), set[str]()
    sizes = dict(zip(units, step.images(work) if step.images else [1] * len(units), strict=True))
    folder, counted = os.path.dirname(min(units, default="")), "images" if step.images else "units"
    with item_progress(step.title, total=sum(sizes.values()), unit=counted) as advance:
        while len(done) < len(units) and not work.is_finished:
            made = {os.path.join(folder, name) for name in os.listdir(work.path / folder)}
            new = (made & sizes.keys()) - done
            done |= new
            advance(sum(sizes[unit] for unit in new))
            if step.check and new:
                step.check(work, sorted(done))
            if len(done) < len(units):
                _wait(work, workers, errors)


def _wait(work: WorkFolder, workers: list[Any], errors: Any) -> None:
    """Wait a moment. Raise what ends the work: an error of a worker or another task."""
    alive = [worker.sentinel for worker in workers if worker.exitcode is None]
    if alive:
        wait(alive, UPDATE_S)
    else:
        time.sleep(FIRST_WAIT_S)
    codes = [worker.exitcode for worker in workers if worker.exitcode]
    if not errors.empty():
        raise errors.get()
    if codes:
        raise Outage(
            f"a worker process died (exit code {codes[0]})",
            where=str(work.path),
            next_step=f"check the system log for 'out of memory'; {USE_LESS_MEMORY}",
        )
    work.raise_failure()


def _run_worker(run: DataPrepRun, steps: Sequence[Step], errors: Any, start: int) -> None:
    """Run one worker process."""
    end_with_server()
    # The default allocator keeps what is freed: a quarter of a worker's memory.
    pa.set_memory_pool(pa.system_memory_pool())
    # Warnings about broken EXIF and the like; faults that matter are in the ledger.
    warnings.filterwarnings("ignore", module="PIL")
    try:
        work_through_steps(WorkFolder(run), steps, start=start)
    except UserError as error:
        errors.put(error)
    except MemoryError:
        what = "a worker process ran out of memory on an image"
        errors.put(Outage(what, next_step=USE_LESS_MEMORY))
    except Exception:
        errors.put(RuntimeError(traceback.format_exc()))


def work_through_steps(work: WorkFolder, steps: Sequence[Step], *, start: int = 0) -> None:
    """Do the units of every step that are free, in this process."""
    try:
        work.open()
        for step in steps:
            if work.is_finished:
                return
            work.raise_failure()
            work.work_through(step.units(work), step.do, start=start)
    except (OSError, UserError) as error:
        if work.is_finished:  # by another process, which removed the folder
            return
        if isinstance(error, OSError):
            raise storage_error(error, work) from error
        if isinstance(error, ChangedSource):
            # It discards all work; a file system that is not mounted must not.
            check_is_mounted(source_root(work.run.source), error.path, work=work.path)
        raise


def storage_error(error: Exception, work: WorkFolder) -> UserError:
    """Return the error for an output that cannot be written. Raises the failure of another task."""
    work.raise_failure()
    code = error.errno if isinstance(error, OSError) else None
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return Outage(
        f"cannot be written ({text}); what was finished so far is kept in {work.path.name}",
        where=str(work.output),
        next_step=f"{'free space' if code in (errno.ENOSPC, errno.EDQUOT) else 'fix this'} and "
        "rerun; the run resumes",
    )
