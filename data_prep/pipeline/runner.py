"""Run the phases of a preparation in worker processes.

Owns: the worker processes of one task, and their errors and signals.
Leaves out: the phases (`phases`), and how processes share units (`work_units`).

Every process of every task runs the same loop: process the free units of a phase, wait until the
others have finished theirs, continue with the next phase. No process is special, so any may die or
start late.
"""

from __future__ import annotations

import errno
import signal
import threading
import traceback
import warnings
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pyarrow as pa

from data_prep.pipeline.phases import PHASES, Phase, PhaseProgress
from data_prep.pipeline.work_units import WorkFolder
from data_prep.pipeline.workspace import Preparation, is_finished, preparation_folder, raise_failure
from data_prep.sources.outages import (
    ChangedSource,
    Interrupted,
    is_source_missing,
    source_missing_error,
)
from data_prep.sources.protocol import SpoolError
from vitscale.config.errors import EXIT_STOPPED_RESUMABLE, UserError
from vitscale.distributed.fork_server import end_with_server, worker_context
from vitscale.distributed.processes import num_cores
from vitscale.runs.data_prep import DataPrepRun

UPDATE_S = 0.5
# A worker that waits for dead storage does not end when it is killed.
EXIT_WAIT_S = 5.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)
USE_LESS_MEMORY = "lower num_workers or images.max_pixels and rerun; the run resumes"
OUT_OF_MEMORY = f"a worker process ran out of memory on an image\n  next: {USE_LESS_MEMORY}"
# What workers need, and what pyarrow imports at first use: 0.3 s and 45 MiB in each of them.
IMPORTS = ("data_prep.pipeline.runner", "pandas", "pyarrow.compute", "pyarrow.parquet")
# Kind of a worker's message -> the exception raised in the main process.
ERRORS = {"interrupted": Interrupted, "corpus": UserError, "crash": RuntimeError}


def prepare(run: DataPrepRun, *, task: int = 0) -> None:
    """Run all phases in this task's processes; return when any tasks have finished them.

    task: number of this task; tasks start at different units.
    Raises Interrupted where a rerun resumes, UserError for a corpus that cannot be used,
    SystemExit(75) after a stop signal.
    """
    workers = run.num_workers or num_cores()
    context = worker_context(IMPORTS)
    reached = context.Array("q", workers, lock=False)
    messages: Any = context.SimpleQueue()
    processes = [
        context.Process(
            target=_work,
            args=(run, reached, messages, worker, task * workers + worker),
            daemon=True,
        )
        for worker in range(workers)
    ]
    p = _open(run)
    stop = threading.Event()
    previous = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: stop.set())
    try:
        for process in processes:
            process.start()
        _watch(PhaseProgress(p, reached), processes, messages, stop)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join(EXIT_WAIT_S)
        for number, handler in previous.items():
            # A second signal must not kill a process that is stopping.
            signal.signal(number, signal.SIG_IGN if stop.is_set() else handler)


def _open(run: DataPrepRun) -> Preparation:
    work = WorkFolder(preparation_folder(Path(run.output).expanduser()))
    p = Preparation(run, work)
    try:
        p.open()
    except OSError as error:
        # The process that finishes the preparation removes its folder.
        if not is_finished(p.output):
            raise storage_error(error, p.output) from None
    return p


def _watch(
    progress: PhaseProgress, processes: list[Any], messages: Any, stop: threading.Event
) -> None:
    """Show progress until all workers have ended; raise the errors they report."""
    while any(process.exitcode is None for process in processes):
        wait([process.sentinel for process in processes if process.exitcode is None], UPDATE_S)
        if not messages.empty():
            break
        if stop.is_set():
            progress.close()
            print("stopped by a signal; run the same command again to resume", flush=True)
            raise SystemExit(EXIT_STOPPED_RESUMABLE)
        dead = [process.exitcode for process in processes if process.exitcode]
        if dead and messages.empty():
            raise Interrupted(
                f"a worker process died (exit code {dead[0]})",
                where=str(progress.p.work.path),
                next_step=f"check the system log for 'out of memory'; {USE_LESS_MEMORY}",
            )
        raise_failure(progress.p.work.path)
        progress.update()
    progress.close()
    if not messages.empty():
        kind, text = messages.get()
        raise ERRORS[kind](text)


def _work(run: DataPrepRun, reached: Any, messages: Any, worker: int, start: int) -> None:
    """Run one worker process."""
    end_with_server()
    # The default allocator keeps what is freed: a quarter of a worker's memory.
    pa.set_memory_pool(pa.system_memory_pool())
    # Warnings about broken EXIF and the like; faults that matter are in the ledger.
    warnings.filterwarnings("ignore", module="PIL")
    try:
        work_through_phases(run, PHASES, reached=reached, worker=worker, start=start)
    except Interrupted as error:
        messages.put(("interrupted", error.text()))
    except UserError as error:
        messages.put(("corpus", error.text()))
    except MemoryError:
        messages.put(("interrupted", OUT_OF_MEMORY))
    except Exception:
        messages.put(("crash", traceback.format_exc()))


def work_through_phases(
    run: DataPrepRun, phases: tuple[Phase, ...], *, reached: Any, worker: int, start: int
) -> None:
    """Run the units of every phase that are free, in this process."""
    p = _open(run)
    try:
        for position, phase in enumerate(phases):
            reached[worker] = position
            _work_through(p, phase, start=start)
    except (OSError, SpoolError, UserError) as error:
        # Another process may have finished the preparation.
        if is_finished(p.output):
            return
        if isinstance(error, (OSError, SpoolError)):
            raise storage_error(error, p.output) from error
        # ChangedSource discards all work; a file system that is not mounted must not.
        if isinstance(error, ChangedSource) and is_source_missing(p.root, error.file):
            raise source_missing_error(p.root, p.work.path) from None
        raise


def _work_through(p: Preparation, phase: Phase, *, start: int) -> None:
    if is_finished(p.output):
        return
    raise_failure(p.work.path)
    p.work.work_through(
        phase.units(p),
        is_done=lambda unit: p.has_result(unit) or is_finished(p.output),
        do=partial(phase.do, p),
        start=start,
    )


def storage_error(error: OSError | SpoolError, output: Path) -> UserError:
    """The error for an output that cannot be written, or a preparation that has ended.

    Raises the error of a preparation that has failed.
    """
    what = "cannot be written"
    if isinstance(error, SpoolError):
        what, error = "the spool cannot be used", error.error
    work = preparation_folder(output)
    raise_failure(work)
    if not work.exists() and output.parent.exists():
        return Interrupted(
            "was removed during the work", where=str(work), next_step="run the command again"
        )
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return Interrupted(
        f"{what} ({error.strerror or error}); the shards finished so far are kept in {work.name}",
        where=str(output),
        next_step=f"{'free space' if full else 'fix this'} and rerun; the run resumes",
    )
