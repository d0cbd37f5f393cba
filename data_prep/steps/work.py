"""Make an output: share units of work among processes on several machines, through a folder.

Owns: the settings that decide the bytes of the output; the work folder `.OUTPUT.preparing`, claims
and their heartbeat; the worker processes of one task, their errors, signals and progress.
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
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from blake3 import blake3

from data_prep.formats.index_files import next_step
from data_prep.formats.ledger import describe_inputs
from data_prep.sources.protocol import ChangedSource, check_is_mounted, source_root
from data_prep.steps.labels import load_labels
from vitscale.config.changes import changed_settings, keys_without_output
from vitscale.config.errors import (
    EXIT_INTERRUPTED,
    EXIT_STOPPED_RESUMABLE,
    FailureKind,
    StorageError,
    UserError,
    WorkerError,
)
from vitscale.config.text_files import read_named
from vitscale.data.folders import files_below
from vitscale.data.index import MANIFEST_NAME, Manifest, read_manifest
from vitscale.data.label_spaces import LABEL_SPACES
from vitscale.distributed.atomic_files import fsync_folder, write_json
from vitscale.distributed.fork_server import SIGNALS
from vitscale.distributed.processes import environment_number, num_cores, num_gpus
from vitscale.distributed.worker_processes import Workers
from vitscale.runs.data_prep import DataPrepRun, SourceSettings
from vitscale.tracking.journal import item_progress

SETTINGS_NAME, FAILED_NAME = "settings.json", "failed.json"
FOLDERS = "claims list spool tars tmp".split()
HEARTBEAT_NAME = "alive"
HEARTBEAT_S = 5.0
# A process is dead when its heartbeat is this old by the file system's clock. Nothing else tells:
# a container that starts again has the host, the process ids and often the namespace of the last.
DEAD_AFTER_S = 60.0
# Pause between two looks at units that others are doing.
WAIT_S = 0.2
# Pause between two lines about what is waited for.
SAY_WAIT_S = 30.0
OWNERS_SHOWN = 4
# A source up to these sizes takes one process 0.2 s, and to start others takes as long.
SMALL_FILES, SMALL_BYTES = 64, 8 << 20
IMPORTS = ("data_prep.steps.finish", "pyarrow.parquet", "PIL.JpegImagePlugin")


class WorkFolder:
    """The folder of a run's unfinished work, as one process uses it."""

    def __init__(self, run: DataPrepRun, task: str = "") -> None:
        """task: of the process that this one works for; empty: it is the task itself."""
        self.run = run
        self.task = task or f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
        output = Path(run.output)
        # The finished folder gets its name by a rename, which cannot replace a link.
        self.output = output.resolve() if output.is_symlink() else output
        self.path = self.output.with_name(f".{self.output.name}.preparing")
        self.scratch = self.path / "tmp" / f"{self.task}.{os.getpid()}"
        """Unfinished files of this process; renamed to their place when whole."""

    def __reduce__(self) -> tuple[type[WorkFolder], tuple[DataPrepRun, str]]:
        return WorkFolder, (self.run, self.task)

    @cached_property
    def source(self) -> Path:
        return source_root(self.run.source)

    @property
    def is_finished(self) -> bool:
        return (self.output / MANIFEST_NAME).exists()

    def open(self) -> None:
        """Create the folders and start the heartbeat.

        Raises FileNotFoundError if the work folder is gone: another process finished the work.
        """
        for name in FOLDERS:
            (self.path / name).mkdir(exist_ok=True)
        self.scratch.mkdir(exist_ok=True)
        (self.scratch / HEARTBEAT_NAME).touch()
        threading.Thread(
            target=_beat, args=(self.scratch / HEARTBEAT_NAME,), daemon=True
        ).start()

    def clean(self) -> None:
        """Remove the unfinished files of dead processes of this host."""
        for left in (self.path / "tmp").glob(f"{socket.gethostname()}-*"):
            if self.is_dead(left.name):
                shutil.rmtree(left, ignore_errors=True)

    def leave(self) -> None:
        """Remove the heartbeats of this task, so that its claims are free at once."""
        for own in (self.path / "tmp").glob(f"{self.task}.*"):
            (own / HEARTBEAT_NAME).unlink(missing_ok=True)

    def temporary(self, name: str) -> Path:
        """A new name for an unfinished file or folder."""
        return self.scratch / f"{name}.{uuid.uuid4().hex[:8]}"

    def commit(self, temporary: Path, name: str) -> None:
        """Flush a file to disk, then rename it."""
        with open(temporary, "rb") as file:
            # Flushed first, since a rename may reach the disk before the content.
            os.fsync(file.fileno())
        os.replace(temporary, self.path / name)
        fsync_folder((self.path / name).parent)

    def commit_table(self, name: str, table: pa.Table) -> None:
        self.commit_tables(name, table.schema, [table])

    def commit_tables(
        self, name: str, schema: pa.Schema, tables: Iterable[pa.Table]
    ) -> None:
        """Write one file of tables, each as a batch of its own; only one is in memory."""
        temporary = self.temporary("table")
        with (
            open(temporary, "wb") as file,
            pa.ipc.new_file(file, schema) as writer,
        ):
            for table in tables:
                writer.write_table(table.combine_chunks())
        self.commit(temporary, name)

    def table(self, name: str) -> pa.Table:
        """Return a memory-mapped table: only the parts read take memory."""
        with pa.memory_map(str(self.path / name)) as source:
            return pa.ipc.open_file(source).read_all()

    def is_done(self, unit: str) -> bool:
        return (self.path / unit).exists() or self.is_finished

    def take(self, claim: Path) -> bool:
        """Claim a unit by a link that names this process. False: another process has it.

        That of a dead process is removed, for the next attempt.
        """
        with suppress(FileNotFoundError):
            try:
                # A link is made in one step, also on file systems without locks.
                os.symlink(self.scratch.name, claim)
                return True
            except FileExistsError:
                if self.is_dead(os.readlink(claim)):
                    claim.unlink()
        return False

    def is_dead(self, owner: str) -> bool:
        """Return True if the heartbeat of a process has stopped."""
        try:
            # Opened: network file systems then ask the server for its time of change.
            with open(self.path / "tmp" / owner / HEARTBEAT_NAME) as file:
                beat = os.fstat(file.fileno()).st_mtime
        except FileNotFoundError:
            return True
        # Its own heartbeat gives the time by the clock of the same file system.
        own = self.scratch / HEARTBEAT_NAME
        os.utime(own)
        return own.stat().st_mtime - beat > DEAD_AFTER_S

    def owners(self, units: Iterable[str]) -> list[str]:
        """Return who is doing these units, as `HOST (process PID)`."""
        found = set()
        for unit in units:
            with suppress(OSError):  # the claim was given up
                task, _, pid = os.readlink(self.claim(unit)).rpartition(".")
                found.add(f"{task.rpartition('-')[0]} (process {pid})")
        return sorted(found)

    def claim(self, unit: str) -> Path:
        return self.path / "claims" / unit.replace("/", "-")

    def failure(self) -> dict[str, Any] | None:
        """Read the error that ended the work for all tasks, and the job that it ended."""
        try:
            return dict(json.loads((self.path / FAILED_NAME).read_text()))
        except FileNotFoundError:
            return None

    def raise_failure(self) -> None:
        failure = self.failure()
        if failure is not None:
            raise UserError(failure["text"])


def _beat(path: Path) -> None:
    while path.parent.exists():
        time.sleep(HEARTBEAT_S)
        with suppress(OSError):
            os.utime(path)  # never creates it in a folder that is being removed


class Step(NamedTuple):
    """One step of the work. Its functions are module-level: workers get them by name."""

    title: str
    units: Callable[[WorkFolder], Sequence[str]]
    """Names of the files to make, relative to the work folder, known after the step before."""
    do: Callable[[WorkFolder, str], None]
    """Make one of them, with the same bytes in any process."""
    images: Callable[[WorkFolder], Sequence[int]] | None = None
    """Images in each unit, which progress counts instead of units."""


class _NoPandas:
    """Hides pandas, which pyarrow would import at first use: 0.3 s and 45 MiB in each process."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("pandas is not needed here", name=name)


def run_steps(work: WorkFolder, steps: Sequence[Step], *, num_workers: int) -> None:
    """Work through the steps; return when any tasks have finished them.

    num_workers: 1 works in this process. Raises StorageError or WorkerError where a rerun resumes,
    UserError for a corpus that cannot be used.
    """
    with _storage_errors(work):
        try:
            # Workers come first: their server is a fork of this process only while that has no
            # thread, such as the heartbeat's, and else takes half a second to import everything.
            with Workers(
                partial(attempt, work), num=num_workers, imports=IMPORTS
            ) as workers:
                work.open()
                work.clean()
                for step in steps:
                    if not work.is_finished:
                        _share(work, step, workers)
        finally:
            work.leave()


# The exit code of a process that a signal has stopped.
_exit_code = 0


def _stop(number: int, _: object) -> None:
    global _exit_code
    _exit_code = EXIT_STOPPED_RESUMABLE
    if number == signal.SIGINT:
        _exit_code = EXIT_INTERRUPTED
    for number in SIGNALS:
        # A second signal must not kill a process that is stopping.
        signal.signal(number, signal.SIG_IGN)
    # Where Python drops the exception below, it would show it as a traceback.
    sys.unraisablehook = lambda _: None
    print("\nstopped by a signal; run the same command again to resume", flush=True)
    raise SystemExit(_exit_code)


def _share(work: WorkFolder, step: Step, workers: Workers) -> None:
    """Return when every unit is done, here or elsewhere."""
    units = step.units(work)
    sizes = dict(
        zip(units, step.images(work) if step.images else [1] * len(units), strict=True)
    )

    # Tasks do not all begin with the first unit, whose claim one alone gets.
    names = [name for name in ("SLURM_ARRAY_TASK_ID", "RANK") if os.environ.get(name)]
    task = environment_number(names[0], least=0) if names else 0
    first = task * workers.num % len(units)
    waiting = [*units[first:], *units[:first]]

    # Each round tries all that is left: a unit that another process has may be free in the next.
    counted = "images" if step.images else "units"
    last_progress = time.monotonic()
    last_line = last_progress
    with item_progress(step.title, total=sum(sizes.values()), unit=counted) as advance:
        while waiting:
            busy = []
            for _, (_, unit), is_done in workers.results(
                (step.do, unit) for unit in waiting
            ):
                work.raise_failure()
                # A weak reference's callback, or C, drops what _stop raises.
                if _exit_code:
                    raise SystemExit(_exit_code)
                if not is_done:
                    busy.append(unit)
                    continue
                advance(sizes[unit])
            now = time.monotonic()
            if len(busy) < len(waiting):
                waiting = busy
                last_progress = now
                last_line = now
                continue

            # Others are doing all that is left.
            if now - last_line >= SAY_WAIT_S:
                last_line = now
                _say_wait(work, step, busy, waited_s=now - last_progress)
            if not work.path.exists() and not work.is_finished:
                raise FileNotFoundError(errno.ENOENT, "it was removed", str(work.path))
            time.sleep(WAIT_S)


def _say_wait(
    work: WorkFolder, step: Step, units: Sequence[str], *, waited_s: float
) -> None:
    shown = ", ".join(work.owners(units)[:OWNERS_SHOWN])
    print(
        f"{step.title}: waited {waited_s:.0f} s for {len(units):,} units of {shown or 'others'}; "
        f"a process that is silent for {DEAD_AFTER_S:.0f} s is replaced",
        flush=True,
    )


def attempt(
    work: WorkFolder, task: tuple[Callable[[WorkFolder, str], None], str]
) -> bool:
    """Do a unit, unless it is done. False: another process is doing it."""
    do, unit = task
    # The default allocator keeps what is freed: a quarter of a worker's memory.
    pa.set_memory_pool(pa.system_memory_pool())

    claim = work.claim(unit)
    try:
        if work.is_done(unit):
            return True
        if not work.scratch.exists():
            work.open()
        if not work.take(claim):
            return False
        try:
            # Another process may have done it between the first look and the claim.
            if not work.is_done(unit):
                do(work, unit)
        finally:
            claim.unlink(missing_ok=True)
    except MemoryError:
        raise WorkerError(
            "a worker process ran out of memory on an image",
            next_step="lower num_workers or images.max_pixels and rerun; the run resumes",
        ) from None
    except (OSError, UserError) as error:
        if work.is_finished:  # by another process, which removed the folder
            return True
        if isinstance(error, ChangedSource):
            # It discards all work; a file system that is not mounted must not.
            check_is_mounted(work.source, error.path, work=work.path)
        raise
    return True


@contextmanager
def _storage_errors(work: WorkFolder) -> Iterator[None]:
    """Raise StorageError for an output that cannot be written, or the failure of another task.

    Nothing if another task has finished the work, and removed the folder.
    """
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        with suppress(OSError):  # where the folder cannot be read either
            if work.is_finished:
                return
            work.raise_failure()
        text = getattr(error, "strerror", None) or str(error)
        is_full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        raise StorageError(
            f"cannot be written ({text}); what was finished so far is kept in {work.path.name}",
            where=work.output,
            next_step=f"{'free space' if is_full else 'fix this'} and rerun; the run resumes",
        ) from error


def make_output(run: DataPrepRun, steps: Sequence[Step]) -> None:
    """Make the output together with other tasks, or find it made already; print what it holds.

    After an interruption the work is kept; an error of the corpus is noted in it for other tasks,
    and the next command starts over. Raises SystemExit after a stop signal: 75, after Ctrl-C 130.
    """
    start = time.monotonic()
    for number in SIGNALS:
        signal.signal(number, _stop)
    finders: list[Any] = sys.meta_path
    finders.insert(0, _NoPandas())

    work = WorkFolder(run)
    made = find_existing(work)
    if made is None:
        open_work_folder(work)
        try:
            num_workers = 1 if _is_small(run.source) else num_cores()
            run_steps(work, steps, num_workers=run.num_workers or num_workers)
        except UserError as error:
            # Failures of other kinds need not occur to other tasks.
            if error.kind is FailureKind.BAD_INPUT:
                with suppress(OSError):
                    _store_failure(work, error)
            raise
    # The folder may be left by a process that was killed after its commit, or made by a late task.
    shutil.rmtree(work.path, ignore_errors=True)

    if made is not None:
        print(
            f"{work.output}: already there, made with the same settings; {run.source.path} was not "
            "looked at again"
        )
        return

    # Compare settings again: another command may have finished it in the meantime.
    manifest = find_existing(work)
    assert manifest is not None
    print(f"\n{work.output}: {describe_inputs(manifest.inputs)}")
    for split, entry in manifest.splits.items():
        mib = f"{entry.num_bytes / 2**20:,.1f} MiB"
        print(
            f"  {split}: {entry.num_samples:,} images in {entry.num_tars:,} tars, {mib}"
        )
    for note in manifest.notes:
        print(f"  note: {note}")
    classes = f"{len(manifest.classes):,} classes" if manifest.classes else "no labels"
    print(
        f"  {classes}, {time.monotonic() - start:.1f} s, ledger.parquet names every input"
    )
    print(f"next: {next_step(work.output, manifest, gpus=num_gpus())}")


def _is_small(source: SourceSettings) -> bool:
    """Return True if one process is done with the source before others would have started."""
    # The images of a table are elsewhere.
    if source.kind == "path_table":
        return False
    with suppress(OSError):
        root = Path(source.path)
        below = [str(root)] if root.is_file() else files_below(root, follow_links=True)
        # One file more than allowed is enough to know.
        files = list(islice(below, SMALL_FILES + 1))
        num_bytes = sum(map(os.path.getsize, files))
        return len(files) <= SMALL_FILES and num_bytes <= SMALL_BYTES
    return False


def find_existing(work: WorkFolder) -> Manifest | None:
    """Return the manifest of an output made with the same settings; None if there is no output.

    Raises UserError for another output, and for a mount point.
    """
    output = work.output
    if os.path.ismount(output):
        raise UserError(
            f"{str(output)!r} is a mount point: the work folder beside it would be on another disk",
            where="output",
            next_step=f"choose a folder in it, such as {output / 'shards'}",
        )
    if not os.path.lexists(output) or (output.is_dir() and not any(output.iterdir())):
        return None

    advice = "choose another output, or remove this folder first"
    try:
        manifest = read_manifest(output)
    except UserError as error:
        raise UserError(
            f"exists already and was not made by this script\n{error.text()}",
            where="output",
            next_step=advice,
        ) from None

    changed = changed_settings(
        manifest.config, content_config(work.run), purpose="output"
    )
    difference = work.run.source.other_place(manifest.source_path)
    if changed:
        difference = f"made with other settings: {', '.join(changed)}"
    if difference:
        raise UserError(
            f"{str(output)!r} exists already, {difference}",
            where="output",
            next_step=advice,
        )
    return manifest


def content_config(run: DataPrepRun) -> dict[str, Any]:
    """The settings that determine the bytes written, and hashes of the files that settings name.

    Paths of source and output and settings of the execution are left out. Raises UserError for a
    file that cannot be read.
    """
    config = run.model_dump(mode="json", exclude=keys_without_output())
    load_labels(run.labels)  # its errors say more than one of a missing file
    for name in ("labels.map", "labels.space", "source.leave_out", "source.val_labels"):
        section, key = name.split(".")
        file = config[section][key]
        if file is not None and file not in LABEL_SPACES:
            config[section][f"{key}_blake3"] = blake3(
                read_named(file, where=name)
            ).hexdigest()
    return config


def check_settings(work: WorkFolder) -> None:
    """Raise UserError unless the work was begun with these settings, source and version."""
    begun = json.loads((work.path / SETTINGS_NAME).read_text())
    if changed := changed_settings(begun, _settings(work.run), purpose="output"):
        raise UserError(
            f"was begun with other settings: {', '.join(changed)}",
            where=work.path,
            next_step="use the same settings again, or remove this folder",
        )


def _settings(run: DataPrepRun) -> dict[str, Any]:
    return content_config(run) | {
        "path": run.source.path,
        "tool_version": tool_version(),
    }


def tool_version() -> str:
    try:
        return f"vitscale {version('vitscale')}"
    except PackageNotFoundError:
        return "vitscale (not installed)"


def open_work_folder(work: WorkFolder) -> None:
    """Create the work folder, or join those who work in it.

    Raises UserError if another task of this array has failed, or the settings are others.
    """
    settings = _settings(work.run)
    aside = work.path.with_name(f"{work.path.name}-{work.scratch.name}")
    with _storage_errors(work):
        if (failure := work.failure()) is not None:
            # The same array would fail in the same way; another command may have fixed the cause.
            if failure["job"] is not None and failure["job"] == _array_job():
                raise UserError(failure["text"])
            # Start over. Renamed, since another process may do so at the same moment.
            with suppress(FileNotFoundError):
                work.path.rename(aside)
                if not (aside / FAILED_NAME).exists():  # it has just begun anew
                    aside.rename(work.path)
            shutil.rmtree(aside, ignore_errors=True)

        if not work.path.exists():
            aside.mkdir(parents=True, exist_ok=True)
            write_json(aside / SETTINGS_NAME, settings)
            with suppress(OSError):
                aside.rename(work.path)  # one of several processes succeeds
            shutil.rmtree(aside, ignore_errors=True)
        check_settings(work)


def _store_failure(work: WorkFolder, error: UserError) -> None:
    """Record the error for all tasks, which would fail alike. The next command starts over."""
    if work.failure() is None:
        write_json(work.path / FAILED_NAME, {"job": _array_job(), "text": error.text()})
        for name in ("spool", "tars"):
            # Only these are large; the next command starts over without them.
            shutil.rmtree(work.path / name, ignore_errors=True)


def _array_job() -> str | None:
    return os.environ.get("SLURM_ARRAY_JOB_ID")
