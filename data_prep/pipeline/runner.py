"""The phases of a preparation, and the processes that work through them.

Owns: the order of phases, the worker processes of one task, progress, errors and signals.
Leaves out: what a unit does (one module per phase), and sharing units (`work_units`).

Every process of every task runs the same loop: take each phase's units as far as they are free,
wait for the rest, go on to the next phase. No process is special, so any may die or come late.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from data_prep.pipeline import finishing, listing, planning, selection, shard_writing
from data_prep.pipeline.row_tables import leave_pandas_out
from data_prep.pipeline.work_units import WorkFolder, aborted_error
from data_prep.pipeline.workspace import Preparation, is_finished, preparation_folder
from data_prep.sources.outages import (
    ChangedSource,
    Interrupted,
    is_source_missing,
    source_missing_error,
)
from data_prep.sources.protocol import SpoolError
from vitscale.config.errors import EXIT_STOPPED_RESUMABLE, UserError
from vitscale.distributed.processes import num_cores
from vitscale.runs.data_prep import DataPrepRun
from vitscale.tracking.console import ElapsedProgress, ItemProgress

UPDATE_S = 0.5
# Of each worker: the phase, rows done in its unit, whether it has one.
NUM_COUNTERS = 3
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)
LESS_MEMORY = (
    "lower num_workers or images.max_pixels and run the same command again: it goes on where it was"
)
OUT_OF_MEMORY = f"a worker process found no memory for an image\n  next: {LESS_MEMORY}"
# How a worker's message is raised in the process that people see.
ERRORS = {"interrupted": Interrupted, "verdict": UserError, "crash": RuntimeError}


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One step of a preparation."""

    title: str
    units: Callable[[Preparation], list[str]]
    do: Callable[[Preparation, str], None]
    weight: Callable[[Preparation, str], int] | None = None
    """Images in a unit, for progress; None: only the time is shown."""
    rows: Callable[[Preparation, str], int] | None = None
    """Inputs in a unit that is done, where `weight` counts containers: nobody knows their total."""
    needed: Callable[[DataPrepRun], bool] = lambda run: True


def _one(name: str) -> Callable[[Preparation], list[str]]:
    return lambda p: [name]


def _per_bucket(name: str) -> Callable[[Preparation], list[str]]:
    return lambda p: [f"{name}-{number:06d}" for number in range(p.result("buckets"))]


def _bucket_rows(p: Preparation, unit: str) -> int:
    rows: int = p.result(f"bucket-{unit.rpartition('-')[2]}")["num_rows"]
    return rows


def _shard_rows(p: Preparation, unit: str) -> int:
    _, split, number = unit.split("-")
    return planning.read_plan(p)[split].shard_lengths[int(number)]


LISTING_PHASES = (
    Phase(title="open source", units=_one("containers"), do=listing.list_containers),
    Phase(
        title="list inputs",
        units=listing.scan_units,
        do=listing.scan,
        weight=listing.num_containers,
        rows=listing.num_listed,
    ),
)
PHASES = (
    *LISTING_PHASES,
    Phase(title="count", units=_one("buckets"), do=listing.count_buckets),
    Phase(title="order", units=_per_bucket("bucket"), do=listing.make_bucket),
    Phase(
        title="describe evaluation sets",
        units=_one("evaluation"),
        do=selection.index_evaluation_sets,
        needed=lambda run: bool(run.selection.evaluation_sets),
    ),
    Phase(
        title="check images",
        units=_per_bucket("survey"),
        do=selection.survey,
        weight=_bucket_rows,
        needed=lambda run: run.needs_survey,
    ),
    Phase(
        title="find duplicates",
        units=_one("duplicates"),
        do=selection.find_duplicate_images,
        needed=lambda run: run.selection.duplicates != "keep",
    ),
    Phase(title="select", units=_one("selection"), do=selection.select),
    Phase(title="decide", units=_per_bucket("fate"), do=selection.assign_splits),
    Phase(title="plan shards", units=_one("plan"), do=planning.make_plan),
    Phase(
        title="write shards",
        units=shard_writing.shard_units,
        do=shard_writing.write_shard,
        weight=_shard_rows,
    ),
    Phase(
        title="write index and ledger",
        units=finishing.side_file_units,
        do=finishing.write_side_file,
    ),
    Phase(title="finish", units=_one("finish"), do=finishing.finish),
)


def prepare(run: DataPrepRun, *, phases: tuple[Phase, ...] = PHASES, task: int = 0) -> None:
    """Work through `phases` with this task's processes; return when all are done by anyone.

    Raises Interrupted when the same command goes on, UserError for a corpus that cannot be used,
    SystemExit(75) after a stop signal. `task` spreads tasks over the units.
    """
    workers = run.num_workers or num_cores()
    # Forked while there is one thread: a fresh interpreter would spend a second on imports.
    context = multiprocessing.get_context("fork")
    with _stop_signals_held():
        # It would die of SIGUSR2, and tell people about it.
        resource_tracker.ensure_running()
    counters = context.Array("q", NUM_COUNTERS * workers, lock=False)
    messages: Any = context.SimpleQueue()
    processes = [
        context.Process(
            target=_work,
            args=(run, len(phases), counters, messages, worker, task * workers + worker),
            daemon=True,
        )
        for worker in range(workers)
    ]
    p = _open(run, lambda num: None, lambda: 1)
    stop = threading.Event()
    previous = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: stop.set())
    with _stop_signals_held():
        for process in processes:
            process.start()
    try:
        _watch(PhaseProgress(p, phases, counters), processes, messages, stop)
    finally:
        for process in processes:
            process.kill()
            process.join()
        for number, handler in previous.items():
            # A second signal must not kill what stops already.
            signal.signal(number, signal.SIG_IGN if stop.is_set() else handler)


@contextmanager
def _stop_signals_held() -> Iterator[None]:
    """Start processes that never hear of a stop signal; here it is handled at the end of the block.

    SLURM signals every process of a job at once. A worker that died of it before this process has
    heard would look like a failure.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _open(
    run: DataPrepRun, advance: Callable[[int], None], num_threads: Callable[[], int]
) -> Preparation:
    work = WorkFolder(preparation_folder(Path(run.output).expanduser()))
    p = Preparation(run, work, advance, num_threads)
    try:
        p.open()
    except OSError as error:
        # Another process that finishes meanwhile removes the folder.
        if not is_finished(p.output):
            raise storage_error(error, p.output) from None
    return p


def _watch(
    progress: PhaseProgress, processes: list[Any], messages: Any, stop: threading.Event
) -> None:
    """Show progress until all workers ended; raise what they report."""
    while any(process.exitcode is None for process in processes):
        wait([process.sentinel for process in processes if process.exitcode is None], UPDATE_S)
        if not messages.empty():
            break
        if stop.is_set():
            progress.close()
            print("stopped by a signal; run the same command again to go on", flush=True)
            raise SystemExit(EXIT_STOPPED_RESUMABLE)
        dead = [process.exitcode for process in processes if process.exitcode]
        if dead and messages.empty():
            raise Interrupted(
                f"a worker process died (exit code {dead[0]})",
                where=str(progress.p.work.path),
                next_step=f"look for 'out of memory' in the system log; {LESS_MEMORY}",
            )
        progress.update()
    progress.close()
    if not messages.empty():
        kind, text = messages.get()
        raise ERRORS[kind](text)


class PhaseProgress:
    """Progress lines from the workers' counters and the units that are done."""

    def __init__(self, p: Preparation, phases: tuple[Phase, ...], counters: Any) -> None:
        self.p, self._phases, self._counters = p, phases, counters
        self._shown = -1
        self._weights: dict[str, int] = {}
        self._done: set[str] = set()
        self._rows = 0
        self._line: ItemProgress | ElapsedProgress | None = None

    def update(self) -> None:
        # Workers say what is wrong with storage; progress must not be the first to stumble on it.
        with suppress(OSError):
            self._update()

    def _update(self) -> None:
        reached = max(self._counters[::NUM_COUNTERS])
        if reached != self._shown:
            self._show(reached)
        if self._line is None:
            return
        under_way = sum(self._counters[1::NUM_COUNTERS])
        if isinstance(self._line, ItemProgress):
            self._line.update(self._look() + under_way)
        else:
            self._line.update(self._note(under_way))

    def _look(self) -> int:
        """The weight of all units that are done by now."""
        new = {unit for unit in self._weights.keys() - self._done if self.p.has_result(unit)}
        self._done |= new
        if (rows := self._phases[self._shown].rows) is not None:
            with suppress(FileNotFoundError):  # another process gave the preparation up
                self._rows += sum(rows(self.p, unit) for unit in new)
        return sum(self._weights[unit] for unit in self._done)

    def _note(self, under_way: int) -> str:
        if self._phases[self._shown].rows is None:
            return ""
        done, total = self._look(), sum(self._weights.values())
        return f"{done:,} of {total:,} containers, {self._rows + under_way:,} inputs"

    def _show(self, reached: int) -> None:
        self.close()
        self._shown, self._done, self._weights, self._rows = reached, set(), {}, 0
        phase = self._phases[reached]
        try:
            if phase.weight is not None:
                units = phase.units(self.p)
                self._weights = {unit: phase.weight(self.p, unit) for unit in units}
        except FileNotFoundError:
            return  # the folder got its name meanwhile
        if phase.weight is None or phase.rows is not None:
            self._line = ElapsedProgress(phase.title)
        else:
            self._line = ItemProgress(phase.title, total=sum(self._weights.values()))

    def close(self) -> None:
        with suppress(OSError):
            self._close()

    def _close(self) -> None:
        if isinstance(self._line, ElapsedProgress):
            self._line.close(self._note(under_way=0))
        elif self._line is not None:
            self._line.close()
        self._line = None


def _work(
    run: DataPrepRun, num_phases: int, counters: Any, messages: Any, worker: int, start: int
) -> None:
    """The life of one worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with_parent()
    leave_pandas_out()
    # Broken EXIF and the like; what matters is in the ledger.
    warnings.filterwarnings("ignore", module="PIL")
    try:
        work_through_phases(run, PHASES[:num_phases], counters=counters, worker=worker, start=start)
    except Interrupted as error:
        messages.put(("interrupted", error.text()))
    except UserError as error:
        messages.put(("verdict", error.text()))
    except MemoryError:
        messages.put(("interrupted", OUT_OF_MEMORY))
    except Exception:
        messages.put(("crash", traceback.format_exc()))


def work_through_phases(
    run: DataPrepRun, phases: tuple[Phase, ...], *, counters: Any, worker: int, start: int
) -> None:
    """Take part in every phase, in this process."""

    rows = NUM_COUNTERS * worker + 1

    def advance(num: int) -> None:
        counters[rows] += num

    def num_threads() -> int:
        busy = sum(counters[2::NUM_COUNTERS])
        return len(counters) // NUM_COUNTERS // max(1, busy)

    p = _open(run, advance, num_threads)
    try:
        for position, phase in enumerate(phases):
            if phase.needed(run):
                counters[rows - 1], counters[rows] = position, 0
                _work_through(p, phase, counters=counters, worker=worker, start=start)
    except (OSError, SpoolError, UserError) as error:
        # Another process may have finished the whole preparation, or given it up.
        if is_finished(p.output):
            return
        if isinstance(error, (OSError, SpoolError)):
            raise storage_error(error, p.output) from error
        # A verdict that costs all work: not for a file system that is not mounted here.
        if isinstance(error, ChangedSource) and is_source_missing(p.root, error.file):
            raise source_missing_error(p.root, p.work.path) from None
        raise


def _work_through(p: Preparation, phase: Phase, *, counters: Any, worker: int, start: int) -> None:
    if is_finished(p.output):
        return

    def do(unit: str) -> None:
        rows, busy = NUM_COUNTERS * worker + 1, NUM_COUNTERS * worker + 2
        counters[rows], counters[busy] = 0, 1
        phase.do(p, unit)
        counters[rows], counters[busy] = 0, 0

    p.work.work_through(
        phase.units(p),
        is_done=lambda unit: p.has_result(unit) or is_finished(p.output),
        do=do,
        start=start,
    )


def storage_error(error: OSError | SpoolError, output: Path) -> UserError:
    """For people: the output cannot be written, or its folder is gone."""
    what = "cannot be written"
    if isinstance(error, SpoolError):
        what, error = "the spool cannot be used", error.error
    work = preparation_folder(output)
    if not work.exists() and output.parent.exists():
        return aborted_error(work)
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return Interrupted(
        f"{what} ({error.strerror or error}); the shards finished so far are kept in {work.name}",
        where=str(output),
        next_step=f"{'free space' if full else 'mend this'} and run the same command again: it "
        "goes on where it was",
    )


def _end_with_parent() -> None:
    """Leave when the parent is killed: nothing else would tell."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
