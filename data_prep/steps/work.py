"""Share units of work among processes on several machines, through a folder.

Owns: the work folder `.OUTPUT.preparing`, claims and their heartbeat, the worker processes of one
task, their errors, signals and progress.
Leaves out: what a unit does (the other modules of this package).

A unit is named after the file that it makes, is done if that file exists, and makes the same bytes
in any process. So a claim only saves work: two processes may do the same unit. Every task runs the
same loop: do the free units of a step, wait until the others have done theirs, go on with the next
step. No task is special, so any may die or start late.
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
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pyarrow as pa

from data_prep.sources.protocol import ChangedSource, Outage, check_is_mounted, source_root
from vitscale.config.errors import EXIT_STOPPED_RESUMABLE, UserError
from vitscale.data.index import MANIFEST_NAME
from vitscale.distributed.atomic_files import fsync_folder
from vitscale.distributed.fork_server import end_with_server, worker_context
from vitscale.distributed.processes import is_alive
from vitscale.runs.data_prep import DataPrepRun
from vitscale.tracking.console import item_progress

FAILED_NAME = "failed.json"
FOLDERS = ("claims", "list", "spool", "tars", "tmp")
HEARTBEAT_NAME, HEARTBEAT_S = "alive", 5.0
# A process of another machine is dead when its heartbeat is this old by the file system's clock.
DEAD_AFTER_S = 60.0
# Pauses start short, since most waits are, and grow: no pause is longer than a quarter of the wait.
FIRST_WAIT_S, WAIT_GROWTH, LONGEST_WAIT_S = 0.005, 1.25, 1.0
CHECK_S = 1.0
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


_work: WorkFolder
"""Of this worker process."""


class WorkFolder:
    """The view of one process on the folder of a run's unfinished work."""

    def __init__(self, run: DataPrepRun) -> None:
        self.run = run
        output = Path(run.output).expanduser()
        # The finished folder gets its name by a rename, which cannot replace a link.
        self.output = output.resolve() if output.is_symlink() else output
        self.path = self.output.with_name(f".{self.output.name}.preparing")
        self.scratch = self.path / "tmp" / this_process()
        """Unfinished files of this process; renamed to their place when whole."""

    @cached_property
    def source(self) -> Path:
        return source_root(self.run.source)

    @property
    def is_finished(self) -> bool:
        return (self.output / MANIFEST_NAME).exists()

    def open(self) -> None:
        """Create the folders, start the heartbeat, and remove what dead processes left.

        Raises FileNotFoundError if the work folder is gone: another process finished the work.
        """
        # Warnings about broken EXIF and the like; faults that matter are in the ledger.
        warnings.filterwarnings("ignore", module="PIL")
        for name in FOLDERS:
            (self.path / name).mkdir(exist_ok=True)
        for left in (self.path / "tmp").glob(f"{machine()}.*"):
            if self.is_dead(left.name):
                shutil.rmtree(left, ignore_errors=True)
        self.scratch.mkdir(exist_ok=True)
        (self.scratch / HEARTBEAT_NAME).touch()
        threading.Thread(target=_beat, args=(self.scratch / HEARTBEAT_NAME,), daemon=True).start()

    def temporary(self, name: str) -> Path:
        """A new name for an unfinished file or folder."""
        return self.scratch / f"{name}.{uuid.uuid4().hex[:8]}"

    def commit(self, temporary: Path, name: str) -> None:
        """Give a file its name when it is on disk."""
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, self.path / name)
        fsync_folder((self.path / name).parent)

    def commit_table(self, name: str, table: pa.Table) -> None:
        temporary = self.temporary("table")
        with open(temporary, "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
        self.commit(temporary, name)

    def table(self, name: str) -> pa.Table:
        """Return a memory-mapped table: only the parts read take memory."""
        with pa.memory_map(str(self.path / name)) as source:
            return pa.ipc.open_file(source).read_all()

    def is_done(self, unit: str) -> bool:
        return (self.path / unit).exists() or self.is_finished

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

    def is_dead(self, owner: str) -> bool:
        """Whether a process has ended; one of another machine is told by its heartbeat."""
        where, _, pid = owner.rpartition(".")
        if where == machine():
            return not is_alive(int(pid))
        try:
            # Opened: network file systems then ask the server for its time of change.
            with open(self.path / "tmp" / owner / HEARTBEAT_NAME) as file:
                beat = os.fstat(file.fileno()).st_mtime
        except FileNotFoundError:
            return True
        own = self.scratch / HEARTBEAT_NAME
        os.utime(own)
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
            os.utime(path)  # never creates it in a folder that is being removed


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


def run_steps(work: WorkFolder, steps: Sequence[Step], *, num_workers: int) -> None:
    """Work through the steps; return when any tasks have finished them.

    num_workers: 1 works in this process. Raises Outage where a rerun resumes, UserError for a
    corpus that cannot be used.
    """
    task = int(os.environ.get("SLURM_ARRAY_TASK_ID") or os.environ.get("RANK") or 0)
    others, pool = active_children(), None
    try:
        work.open()
        if num_workers > 1:
            context = worker_context(IMPORTS)
            pool = ProcessPoolExecutor(num_workers, context, _start_worker, (work.run,))
        for step in steps:
            if not work.is_finished:
                _share(work, step, pool, start=task * num_workers)
    except (OSError, pa.ArrowException) as error:
        # Another task may have finished the work, and removed the folder.
        if not work.is_finished:
            raise storage_error(error, work) from error
    except BrokenProcessPool:
        raise Outage(
            "a worker process died",
            where=str(work.path),
            next_step=f"check the system log for 'out of memory'; {USE_LESS_MEMORY}",
        ) from None
    finally:
        if pool is not None:
            # They may wait for dead storage.
            for worker in set(active_children()) - set(others):
                worker.kill()
            pool.shutdown(wait=False, cancel_futures=True)


def stop(*_: object) -> None:
    for number in STOP_SIGNALS:
        # A second signal must not kill a process that is stopping.
        signal.signal(number, signal.SIG_IGN)
    print("\nstopped by a signal; run the same command again to resume", flush=True)
    raise SystemExit(EXIT_STOPPED_RESUMABLE)


def _share(work: WorkFolder, step: Step, pool: ProcessPoolExecutor | None, *, start: int) -> None:
    """Return when every unit is done, here or elsewhere.

    start: the unit to begin with, so that tasks do not all try the same claims first.
    """
    units = step.units(work)
    sizes = dict(zip(units, step.images(work) if step.images else [1] * len(units), strict=True))
    first = start % max(1, len(units))
    waiting, done = [*units[first:], *units[:first]], list[str]()
    pause, checked = FIRST_WAIT_S, time.monotonic()
    counted = "images" if step.images else "units"
    with item_progress(step.title, total=sum(sizes.values()), unit=counted) as advance:
        while waiting:
            busy = []
            for unit, is_done in _attempts(work, step, waiting, pool):
                if not is_done:
                    busy.append(unit)
                    continue
                done.append(unit)
                advance(sizes[unit])
                if time.monotonic() - checked > CHECK_S:
                    work.raise_failure()
                    if step.check:
                        step.check(work, sorted(done))
                    checked = time.monotonic()
            work.raise_failure()
            if len(busy) == len(waiting):
                if not work.path.exists() and not work.is_finished:
                    raise FileNotFoundError(errno.ENOENT, "it was removed", str(work.path))
                time.sleep(pause)
                pause = min(WAIT_GROWTH * pause, LONGEST_WAIT_S)
            waiting = busy


def _attempts(
    work: WorkFolder, step: Step, units: Sequence[str], pool: ProcessPoolExecutor | None
) -> Iterator[tuple[str, bool]]:
    if pool is None:
        yield from ((unit, attempt(work, step.do, unit)) for unit in units)
        return
    futures = {pool.submit(_attempt_here, step.do, unit): unit for unit in units}
    for future in as_completed(futures):
        yield futures[future], future.result()


def attempt(work: WorkFolder, do: Callable[[WorkFolder, str], None], unit: str) -> bool:
    """Do a unit, unless it is done. False: another process is doing it."""
    claim = work.path / "claims" / unit.replace("/", "-")
    try:
        if work.is_done(unit):
            return True
        if not work.scratch.exists():
            work.open()
        if not work.take(claim):
            return False
        try:
            if not work.is_done(unit):
                do(work, unit)
        finally:
            claim.unlink(missing_ok=True)
    except MemoryError:
        what = "a worker process ran out of memory on an image"
        raise Outage(what, next_step=USE_LESS_MEMORY) from None
    except (OSError, UserError) as error:
        if work.is_finished:  # by another process, which removed the folder
            return True
        if isinstance(error, ChangedSource):
            # It discards all work; a file system that is not mounted must not.
            check_is_mounted(work.source, error.path, work=work.path)
        raise
    return True


def _start_worker(run: DataPrepRun) -> None:
    global _work
    end_with_server()
    # The default allocator keeps what is freed: a quarter of a worker's memory.
    pa.set_memory_pool(pa.system_memory_pool())
    _work = WorkFolder(run)


def _attempt_here(do: Callable[[WorkFolder, str], None], unit: str) -> bool:
    return attempt(_work, do, unit)


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
