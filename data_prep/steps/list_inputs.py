"""List the inputs of the source: containers, then the rows of each, one Arrow file per unit.

Also reads and checks an input that was listed.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data_prep.images.check import MAX_FILE_BYTES, CheckedImage, check_image
from data_prep.sources.protocol import (
    ChangedSource,
    Container,
    Input,
    printable,
    raise_if_outage,
    source_root,
    with_damage,
)
from data_prep.sources.registry import open_source
from data_prep.steps.labels import Labels, load_labels
from data_prep.steps.rows import ROW_SCHEMA, commit_file, rows_table
from data_prep.steps.work import WorkFolder
from vitscale.config.errors import UserError
from vitscale.distributed.atomic_files import write_json
from vitscale.runs.data_prep import ImageSettings

CONTAINERS = "containers.json"
# Containers per unit: class folders and tars of hundreds of images each. Fewer where there would
# not be a unit for each of eight processes.
MAX_CONTAINERS_PER_UNIT = 64
MIN_UNITS = 8
BATCH_ROWS = 1 << 15


def containers_units(work: WorkFolder) -> list[str]:
    return [CONTAINERS]


def list_containers(work: WorkFolder, unit: str) -> None:
    source = open_source(work.run.source, work.run.labels)
    write_json(work.path / unit, [astuple(container) for container in source.containers()])


def read_containers(work: WorkFolder) -> list[Container]:
    return [Container(*row) for row in json.loads((work.path / CONTAINERS).read_text())]


def _of_units(work: WorkFolder) -> list[list[Container]]:
    """The containers of each unit."""
    found = read_containers(work)
    size = min(MAX_CONTAINERS_PER_UNIT, max(1, len(found) // MIN_UNITS))
    return [found[start : start + size] for start in range(0, len(found), size)]


def list_units(work: WorkFolder) -> list[str]:
    return [f"list/{number:06d}.arrow" for number in range(len(_of_units(work)))]


def list_inputs(work: WorkFolder, unit: str) -> None:
    """List the containers of one unit; bytes that can be read only once go to its spool file."""
    run, number = work.run, int(Path(unit).stem)
    inputs = _inputs(work, _of_units(work)[number])
    temporary, spool = work.temporary("list"), work.temporary("spool")
    with (
        open(spool, "wb") as spooled,
        open(temporary, "wb") as file,
        pa.ipc.new_file(file, ROW_SCHEMA) as writer,
    ):
        while batch := list(islice(inputs, BATCH_ROWS)):
            for item in batch:
                if item.data is not None:
                    item.file, item.offset, item.spooled = f"{number:06d}.bin", spooled.tell(), True
                    spooled.write(item.data)
                    item.data = None
            writer.write_table(rows_table(batch, seed=run.seed))
        num_spooled = spooled.tell()
    if num_spooled:
        commit_file(spool, work.path / "spool" / f"{number:06d}.bin")
    commit_file(temporary, work.path / unit)


def _inputs(work: WorkFolder, containers: Sequence[Container]) -> Iterator[Input]:
    """Yield every input with its final class name, or the reason that its class rejects it."""
    source = open_source(work.run.source, work.run.labels)
    labels, dropped = load_labels(work.run.labels), left_out(work.run.source.leave_out)
    for container in containers:
        for item in with_damage(container, source.inputs(container)):
            if item.reason is None and dropped and printable(item.path) in dropped:
                item.reason = "left_out"
            set_class(item, labels)
            yield item


def set_class(item: Input, labels: Labels) -> None:
    """Map the class of a usable input; one without a class in the map or space is rejected."""
    if item.reason is None:
        class_name = labels.class_of(item.class_name)
        if class_name is None:
            item.reason = "unknown_class"
        else:
            item.class_name = class_name


@dataclass(frozen=True, kw_only=True)
class InputReader:
    """Reads and checks listed inputs, from the source or from the spool."""

    images: ImageSettings
    source: Path
    spool: Path | None = None
    convert: bool = True

    @classmethod
    def of(cls, work: WorkFolder) -> InputReader:
        source = source_root(work.run.source)
        return cls(images=work.run.images, source=source, spool=work.path / "spool")

    def check(self, row: Mapping[str, Any]) -> CheckedImage:
        """Check one input. Its hash is empty if its bytes were not read.

        row: `path`, `file`, `offset`, `num_bytes`, `modified_ns` and `spooled`. Raises
        ChangedSource if the source has changed since it was listed, Outage.
        """
        if row["num_bytes"] > MAX_FILE_BYTES:
            return CheckedImage("too_large", b"")
        name = os.fsencode(row["file"] or row["path"])
        try:
            data = self._read(name, row)
        except OSError as error:
            if row["spooled"]:
                raise
            if isinstance(error, FileNotFoundError):
                raise ChangedSource(os.fsdecode(name)) from None
            raise_if_outage(error, os.fsdecode(row["path"]))
            return CheckedImage("unreadable", b"")
        return check_image(data, settings=self.images, convert=self.convert)

    def _read(self, name: bytes, row: Mapping[str, Any]) -> bytes:
        folder = self.spool if row["spooled"] else self.source
        # Joined as bytes: pathlib would take as long as the reading.
        with open(os.path.join(os.fsencode(str(folder)), name), "rb") as file:
            status = os.fstat(file.fileno())
            is_same = status.st_mtime_ns == row["modified_ns"] and (
                bool(row["file"]) or status.st_size == row["num_bytes"]
            )
            if is_same or row["spooled"]:
                file.seek(row["offset"])
                data = file.read(row["num_bytes"])
                if len(data) == row["num_bytes"]:
                    return data
        if row["spooled"]:
            raise OSError(errno.EIO, "the spool is too short")
        raise ChangedSource(os.fsdecode(name))


@lru_cache(maxsize=1)
def left_out(file: str | None) -> dict[str, str]:
    """Path of each image that `source.leave_out` does not keep -> the image that it copies."""
    if file is None:
        return {}
    try:
        table = pq.read_table(Path(file).expanduser(), columns=["path", "keep", "copy_of"])
        dropped = table.filter(pc.invert(table["keep"]))
        return dict(zip(*(dropped[name].to_pylist() for name in ("path", "copy_of")), strict=True))
    except (OSError, pa.ArrowException) as error:
        raise UserError(
            f"{file!r} cannot be read ({error})",
            where="source.leave_out",
            allowed="duplicates.parquet of data_prep/find_duplicates.py",
        ) from None
