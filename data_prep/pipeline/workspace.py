"""Manage the preparation folder, through which phases pass their results to later phases.

Owns: the names inside `.OUTPUT.preparing`, small JSON results, and reading an input's bytes.
Leaves out: the phases and their order (`phases`).
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data_prep.labels.assignment import Labels, load_labels
from data_prep.labels.label_files import label_hashes
from data_prep.pipeline.work_units import WorkFolder
from data_prep.sources.outages import ChangedSource, changed_source_error
from data_prep.sources.paths import hash_named_file
from data_prep.sources.protocol import Container, Source, SpoolError, read_exactly
from data_prep.sources.registry import open_source
from vitscale.config.errors import UserError
from vitscale.data.index import MANIFEST_NAME
from vitscale.distributed.atomic_files import write_json
from vitscale.runs.data_prep import DataPrepRun

SETTINGS_NAME = "settings.json"
FAILED_NAME = "failed.json"
# Format of the files in a preparation folder: raised when a release cannot resume another's work.
WORK_FORMAT = 5
# Settings that do not change the bytes of the result.
EXECUTION_KEYS = ("output", "launch", "num_workers", "script")
FOLDERS = (
    "results",
    "runs",
    "spool",
    "buckets",
    "rejected",
    "assignments",
    "tars",
    "outcomes",
    "final",
)


def content_config(run: DataPrepRun) -> dict[str, Any]:
    """The settings that determine the bytes written, and hashes of the files that settings name.

    Paths of source and output and settings of the execution are left out. Raises UserError for a
    file that cannot be read.
    """
    config = run.model_dump(mode="json")
    for key in EXECUTION_KEYS:
        del config[key]
    del config["source"]["path"]
    config["labels"] |= label_hashes(run.labels)
    for key in ("leave_out", "val_labels"):
        if (named := getattr(run.source, key)) is not None:
            file = Path(named).expanduser()
            config["source"][f"{key}_blake3"] = hash_named_file(file, where=f"source.{key}")
    return config


def changed_settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Keys with different values, such as seed and labels.map_blake3."""
    before, after = dict(_flat(old)), dict(_flat(new))
    return sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))


def unchanged_config(begun: Mapping[str, Any], run: DataPrepRun) -> dict[str, Any]:
    """The present `content_config`. Raises UserError if it differs from that at the start."""
    config = content_config(run)
    if changed := changed_settings({key: begun[key] for key in config if key in begun}, config):
        raise UserError(
            "changed while the shards were made",
            where=", ".join(changed),
            next_step="run the command again",
        )
    return config


def _flat(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from ((f"{key}.{name}", inner) for name, inner in value.items())
        else:
            yield key, value


def tool_version() -> str:
    try:
        return f"vitscale {version('vitscale')}"
    except PackageNotFoundError:
        return "vitscale (not installed)"


def at_real_output(run: DataPrepRun) -> DataPrepRun:
    """The run with `output` resolved if it is a symbolic link: the work folder is its neighbour.

    The finished folder gets its name by a rename, which cannot replace a link or cross file
    systems. Raises UserError for a mount point.
    """
    output = Path(run.output).expanduser()
    real = Path(os.path.realpath(output)) if output.is_symlink() else output
    if os.path.ismount(real):
        raise UserError(
            f"{str(real)!r} is a mount point: the work folder beside it would be on another file "
            "system",
            where="output",
            next_step=f"choose a folder in it, such as {real / 'shards'}",
        )
    return run if real is output else run.model_copy(update={"output": str(real)})


def is_finished(output: Path) -> bool:
    return (output / MANIFEST_NAME).exists()


def preparation_folder(output: Path) -> Path:
    return output.with_name(f".{output.name}.preparing")


def read_failure(work: Path) -> dict[str, Any] | None:
    """The error that ended the work for all tasks, with the job of the task that met it."""
    try:
        found: dict[str, Any] = json.loads((work / FAILED_NAME).read_text())
    except FileNotFoundError:
        return None
    return found


def raise_failure(work: Path) -> None:
    """Raise the error that another process stored, if any."""
    failure = read_failure(work)
    if failure is not None:
        raise UserError(failure["text"])


class InputLocation(NamedTuple):
    """Where the bytes of one input are stored."""

    path: bytes
    file: bytes
    offset: int
    num_bytes: int
    modified_ns: int
    spooled: bool


def row_locations(rows: pa.Table) -> Iterator[InputLocation]:
    columns = [
        rows.column(name).to_pylist()
        for name in ("path", "file", "offset", "num_bytes", "modified_ns", "spooled")
    ]
    for path, file, offset, num_bytes, modified_ns, spooled in zip(*columns, strict=True):
        yield InputLocation(
            path=path,
            file=file,
            offset=offset,
            num_bytes=num_bytes,
            modified_ns=modified_ns,
            spooled=spooled,
        )


@dataclass(frozen=True)
class Preparation:
    """The view of one process on a preparation."""

    run: DataPrepRun
    work: WorkFolder

    def open(self) -> None:
        """Create the subfolders."""
        self.work.open()
        for name in FOLDERS:
            self.path(name).mkdir(exist_ok=True)

    @cached_property
    def output(self) -> Path:
        return Path(self.run.output).expanduser()

    @cached_property
    def root(self) -> Path:
        return self.source.root

    @cached_property
    def source(self) -> Source:
        return open_source(self.run.source, self.run.labels)

    @cached_property
    def labels(self) -> Labels:
        return load_labels(self.run.labels)

    @cached_property
    def left_out(self) -> dict[str, str]:
        """Path of each image that `source.leave_out` does not keep -> the image that it copies."""
        file = self.run.source.leave_out
        if file is None:
            return {}
        try:
            table = pq.read_table(Path(file).expanduser(), columns=["path", "keep", "copy_of"])
            dropped = table.filter(pc.invert(table["keep"]))
            return dict(
                zip(*(dropped[name].to_pylist() for name in ("path", "copy_of")), strict=True)
            )
        except (OSError, pa.ArrowException) as error:
            raise UserError(
                f"{file!r} cannot be read ({error})",
                where="source.leave_out",
                allowed="duplicates.parquet of data_prep/find_duplicates.py",
            ) from None

    @cached_property
    def containers(self) -> list[Container]:
        return [Container(*row) for row in self.result("containers")]

    def path(self, *parts: str) -> Path:
        """A path in the preparation folder."""
        return self.work.path.joinpath(*parts)

    def result_path(self, unit: str) -> Path:
        return self.path("results", f"{unit}.json")

    def has_result(self, unit: str) -> bool:
        return self.result_path(unit).exists()

    def result(self, unit: str) -> Any:
        """The small JSON result of a finished unit."""
        return json.loads(self.result_path(unit).read_text())

    def put_result(self, unit: str, value: Any) -> None:
        """Commit a unit. Call it last: the unit counts as finished from then on."""
        write_json(self.result_path(unit), value)

    @cached_property
    def _folders(self) -> tuple[bytes, bytes]:
        return os.fsencode(self.root), os.fsencode(self.path("spool"))

    def read(self, location: InputLocation) -> bytes:
        """The bytes of one input.

        Raises ChangedSource if the source has changed since it was listed, OSError if it cannot be
        read, SpoolError for the spool.
        """
        # System calls: pathlib and file objects would take as long as the reading.
        source, spool = self._folders
        path = b"%s/%s" % (spool if location.spooled else source, location.file or location.path)
        try:
            file = os.open(path, os.O_RDONLY)
            try:
                status = os.fstat(file)
                whole = not location.file
                if not location.spooled and (
                    status.st_mtime_ns != location.modified_ns
                    or (whole and status.st_size != location.num_bytes)
                ):
                    raise _changed(location)
                return read_exactly(file, offset=location.offset, num_bytes=location.num_bytes)
            finally:
                os.close(file)
        except (OSError, EOFError) as error:
            if location.spooled:
                cut = OSError(errno.EIO, f"too short: {error}")
                raise SpoolError(error if isinstance(error, OSError) else cut) from None
            if isinstance(error, (FileNotFoundError, EOFError)):
                raise _changed(location) from None
            raise


def _changed(location: InputLocation) -> ChangedSource:
    return changed_source_error(
        os.fsdecode(location.path), file=os.fsdecode(location.file or location.path)
    )
