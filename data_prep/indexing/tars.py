"""Index one external tar in place.

Owns: validating the images of one tar without rewriting them, and the table of its rows.
Leaves out: finding samples in a tar (`sources.webdataset_tars`), the finished folder (`folder`).

Each tar gives one table, committed by rename: a killed run resumes with the next tar, and memory
holds the rows of one tar per worker.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from data_prep.images.check import MAX_FILE_BYTES, validate_image
from data_prep.indexing.remote import RemoteTar
from data_prep.labels.assignment import Labels, load_labels
from data_prep.pipeline.row_tables import write_table
from data_prep.pipeline.work_units import LONGEST_WAIT_S, WorkFolder
from data_prep.shards.tar_walk import TarFile
from data_prep.sources.outages import changed_source_error, printable
from data_prep.sources.protocol import Container, Input, read_exactly
from data_prep.sources.registry import open_source
from data_prep.sources.webdataset_tars import WebdatasetTars
from vitscale.data.urls import Location, Url
from vitscale.distributed.atomic_files import blake3_of_file, write_json
from vitscale.runs.data_prep import DataPrepRun

# Reason for sound images that must be converted to be usable, which would mean rewriting the tar.
PACKED = "packed"
TAR_SCHEMA = pa.schema(
    [
        ("path", pa.string()),
        ("class", pa.string()),
        ("reason", pa.string()),
        ("detail", pa.string()),
        ("key", pa.string()),
        ("offset", pa.int64()),
        ("length", pa.int64()),
        ("format", pa.string()),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("blake3", pa.binary(32)),
    ]
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TarUnit:
    """One tar to index, as passed to a worker."""

    run: DataPrepRun
    folder: Path
    root: Location
    """The folder or URL that the container's path is relative to."""
    number: int
    container: Container

    @property
    def table_path(self) -> Path:
        return self.folder / f"{self.number:06d}.arrow"

    @property
    def result_path(self) -> Path:
        return self.folder / f"{self.number:06d}.json"

    @property
    def tar_path(self) -> Location:
        return self.root / self.container.path


@dataclass(frozen=True, kw_only=True, slots=True)
class TarResult:
    """Summary of an indexed tar, whose rows are on disk."""

    num_bytes: int
    modified_ns: int
    blake3: str
    num_kept: int
    classes: dict[str, int]
    """Kept images per class."""
    unknown: dict[str, int]
    """Images per source class that is not in the space or map."""


# Once per process: a map may have a million rows.
_labels = lru_cache(maxsize=1)(load_labels)


class _NoSpool:
    def add(self, data: bytes) -> tuple[str, int]:
        raise AssertionError("members of a plain tar need no spool")


def index_tar(unit: TarUnit) -> TarResult:
    """Validate every image of a tar and write its rows; a tar already indexed is not read again.

    A folder gives rows for the files beside its tars.
    """
    if isinstance(unit.tar_path, Url):
        return _index_remote_tar(unit, unit.tar_path)
    status = os.stat(unit.tar_path)
    is_tar = stat.S_ISREG(status.st_mode)
    num_bytes = status.st_size if is_tar else 0
    done = _earlier_result(unit)
    if done and is_tar and (done.num_bytes, done.modified_ns) == (num_bytes, status.st_mtime_ns):
        return done
    unknown: Counter[str] = Counter()
    rows = _tar_rows(unit, unknown) if is_tar else _other_file_rows(unit)
    result = TarResult(
        num_bytes=num_bytes,
        modified_ns=status.st_mtime_ns,
        # Read again, now from memory: the images were just read.
        blake3=blake3_of_file(unit.tar_path) if is_tar else "",
        num_kept=sum(1 for row in rows if row["reason"] is None),
        classes=dict(Counter(row["class"] for row in rows if row["reason"] is None)),
        unknown=dict(unknown),
    )
    now = os.stat(unit.tar_path)
    if (now.st_mtime_ns, now.st_size) != (status.st_mtime_ns, status.st_size):
        raise changed_source_error(unit.container.path)
    _write(unit, rows, result)
    return result


def _index_remote_tar(unit: TarUnit, url: Url) -> TarResult:
    """The same through range requests; every byte is read once, in order, and none is kept."""
    done = _earlier_result(unit)
    with RemoteTar(url) as tar:
        if done is not None and done.num_bytes == tar.num_bytes:
            return done
        source = WebdatasetTars(unit.run.source, unit.run.labels)
        found = source.rows(tar, unit.container, num_bytes=tar.num_bytes, modified_ns=0)
        unknown: Counter[str] = Counter()
        rows = _rows(found, tar, unit, unknown)
        result = TarResult(
            num_bytes=tar.num_bytes,
            modified_ns=0,
            blake3=tar.blake3(),
            num_kept=sum(1 for row in rows if row["reason"] is None),
            classes=dict(Counter(row["class"] for row in rows if row["reason"] is None)),
            unknown=dict(unknown),
        )
    _write(unit, rows, result)
    return result


def _write(unit: TarUnit, rows: list[dict[str, Any]], result: TarResult) -> None:
    temporary = unit.table_path.with_suffix(f".{os.getpid()}.tmp")
    table = pa.Table.from_pylist(rows, schema=TAR_SCHEMA)
    write_table(table, unit.table_path, temporary=temporary)
    write_json(unit.result_path, {name: getattr(result, name) for name in result.__slots__})


def index_if_free(unit: TarUnit) -> bool:
    """Index a tar unless another process, here or on another machine, is doing so."""
    work = WorkFolder(unit.folder)
    work.open()
    with work.claim(f"{unit.number:06d}") as claimed:
        if claimed:
            index_tar(unit)
        return claimed


def index_when_free(unit: TarUnit) -> bool:
    """Index a tar, or wait until another process has done it."""
    while not index_if_free(unit):
        time.sleep(LONGEST_WAIT_S)
    return True


def stored_result(unit: TarUnit) -> TarResult:
    """The result of an indexed tar."""
    result = _earlier_result(unit)
    assert result is not None, unit.result_path
    return result


def _inputs(unit: TarUnit) -> Iterator[Input]:
    source = open_source(unit.run.source, unit.run.labels)
    for item in source.inputs(unit.container, spool=_NoSpool()):
        if isinstance(item, Input):
            yield item


def _other_file_rows(unit: TarUnit) -> list[dict[str, Any]]:
    rows = []
    for item in _inputs(unit):
        assert item.reason is not None
        row = {"path": printable(item.path), "class": item.class_name, "reason": item.reason}
        rows.append(row)
    return rows


def _tar_rows(unit: TarUnit, unknown: Counter[str]) -> list[dict[str, Any]]:
    assert isinstance(unit.tar_path, Path)
    with open(unit.tar_path, "rb", buffering=0) as file:
        return _rows(_inputs(unit), file.fileno(), unit, unknown)


def _rows(
    inputs: Iterable[Input], file: TarFile, unit: TarUnit, unknown: Counter[str]
) -> list[dict[str, Any]]:
    labels = _labels(unit.run.labels)
    rows = []
    for item in inputs:
        rows.append(_validated_row(item, file, unit, labels))
        if rows[-1]["reason"] == "unknown_class":
            unknown[item.class_name or ""] += 1
    return rows


def _earlier_result(unit: TarUnit) -> TarResult | None:
    try:
        return TarResult(**json.loads(unit.result_path.read_text()))
    except FileNotFoundError:
        return None


def _validated_row(item: Input, file: TarFile, unit: TarUnit, labels: Labels) -> dict[str, Any]:
    """The row of one input, for the ledger, and for the index if `reason` is None."""
    row: dict[str, Any] = {
        "path": printable(item.path),
        "class": item.class_name,
        "reason": item.reason,
        "key": printable(item.name),
        "offset": item.offset,
        "length": item.num_bytes,
    }
    if row["reason"] is None:
        row["class"] = labels.class_of(item.class_name)
        if row["class"] is None:
            row |= {"class": item.class_name, "reason": "unknown_class"}
    if row["reason"] is None and item.num_bytes > MAX_FILE_BYTES:
        row["reason"] = "too_large"
    if row["reason"] is not None:
        return row
    try:
        if isinstance(file, int):
            data = read_exactly(file, offset=item.offset, num_bytes=item.num_bytes)
        else:
            data = file.pread(item.num_bytes, item.offset)
    except EOFError:
        raise changed_source_error(item.path) from None
    result = validate_image(data, settings=unit.run.images, convert=False)
    reason = result.reason
    if reason is None and result.content_hash != result.input_hash:
        reason = PACKED
    facts = {
        "format": result.extension,
        "width": result.width,
        "height": result.height,
        "blake3": result.input_hash,
    }
    return row | facts | {"reason": reason}
