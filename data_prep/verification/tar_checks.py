"""Compare one tar of a shard folder with the manifest and the index.

Leaves out: which tars there are (`checks`), walking a tar (`shards.tar_walk`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from blake3 import blake3

from data_prep.images.check import SUFFIXES
from data_prep.images.header import HeaderError, read_header
from data_prep.shards.tar_walk import TarDefect, TarMember, walk_tar
from vitscale.data.index import NO_LABEL, ShardEntry
from vitscale.images.jpeg.entry_points import (
    find_entry_points,
    read_entry_points,
    write_entry_points,
)

if TYPE_CHECKING:
    import pyarrow as pa

CHUNK_BYTES = 1 << 20
MAX_LABEL_BYTES = 32


@dataclass(frozen=True, slots=True)
class Finding:
    """One error found."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(frozen=True, kw_only=True, slots=True)
class TarTask:
    """One tar and its expected content."""

    path: Path
    entry: ShardEntry
    rows: pa.Table | None
    """Rows of the index; None: it cannot be read."""
    ours: bool
    """Written by make_shards: an image and its label, if any, per sample; no other members."""
    labels_stored: bool
    """Whether KEY.cls holds the label of the index."""
    entry_points: Path
    """File of the entry points of its images, which may be missing."""
    write_entry_points: bool = False


def check_tar(task: TarTask) -> list[Finding]:
    """Compare one tar with the manifest and the index. Raises for no content of the file."""
    found: list[str] = []
    try:
        with open(task.path, "rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes != task.entry.bytes:
                found.append(f"{num_bytes:,} bytes, but the manifest says {task.entry.bytes:,}")
            defect = _check_members(file, task, found)
            num_found = len(found)
            found += _check_content(file, task, num_bytes)
            # An external tar that was damaged already when it was indexed matches its index.
            if defect is not None and (task.ours or len(found) > num_found):
                found.append(str(defect))
    except OSError as error:
        found.append(f"cannot be read ({error.strerror})")
    return [Finding(task.entry.name, what) for what in found]


def _check_content(file: BinaryIO, task: TarTask, num_bytes: int) -> list[str]:
    """Read every byte once: each image's hash and header, and the hash of the whole tar."""
    found = []
    whole = blake3()
    position = 0
    points: dict[int, bytes] | None = None
    if task.write_entry_points or task.entry_points.exists():
        points = {}
    for row in _by_offset(task.rows):
        start, end = row["offset"], row["offset"] + row["length"]
        if not position <= start < end <= num_bytes:
            found.append(f"sample {row['key']!r}: bytes {start:,} to {end:,} are missing")
            continue
        position = _hash_to(file, start, position, whole)
        image = file.read(row["length"])
        whole.update(image)
        position += len(image)
        wrong = _image_problem(image, row)
        if wrong:
            found.append(f"sample {row['key']!r}: {wrong}")
        elif points is not None:
            points[int.from_bytes(row["blake3"][:8], "little")] = find_entry_points(image)
    _hash_to(file, num_bytes, position, whole)
    if whole.hexdigest() != task.entry.blake3:
        found.insert(0, "content differs from the manifest (BLAKE3)")
    if points is not None and task.write_entry_points and not found:
        write_entry_points(task.entry_points, points)
    elif points is not None and not found:
        found += _wrong_entry_points(task, points)
    return found


def _wrong_entry_points(task: TarTask, points: Mapping[int, bytes]) -> Iterator[str]:
    path = task.entry_points
    known = [(key, expected) for key, expected in points.items() if expected]
    wrong = sum(read_entry_points(path, key=key) != expected for key, expected in known)
    if wrong:
        yield (
            f"the entry points of {wrong:,} images are missing or wrong; remove "
            f"{path}, or write it again with --entry-points"
        )


def _by_offset(rows: pa.Table | None) -> list[dict[str, Any]]:
    if rows is None:
        return []
    columns = ["key", "offset", "length", "format", "label", "width", "height", "blake3"]
    return sorted(rows.select(columns).to_pylist(), key=lambda row: row["offset"])


def _hash_to(file: BinaryIO, end: int, position: int, digest: Any) -> int:
    """Read and hash from `position` to `end`; returns the new position."""
    file.seek(position)
    while position < end and (chunk := file.read(min(CHUNK_BYTES, end - position))):
        digest.update(chunk)
        position += len(chunk)
    return position


def _image_problem(image: bytes, row: dict[str, Any]) -> str | None:
    if blake3(image).digest() != row["blake3"]:
        return "the image's bytes differ from the index (BLAKE3)"
    try:
        header = read_header(image)
    except HeaderError as error:
        return f"the image cannot be read ({error.reason})"
    if SUFFIXES[header.format] != row["format"]:
        return f"is {SUFFIXES[header.format]}, but the index says {row['format']}"
    size, expected = (header.width, header.height), (row["width"], row["height"])
    if size != expected and not (header.orientation >= 5 and size == expected[::-1]):
        return f"is {size[0]} x {size[1]}, but the index says {expected[0]} x {expected[1]}"
    return None


def _check_members(file: BinaryIO, task: TarTask, found: list[str]) -> TarDefect | None:
    """Compare the tar's members with the index: names, offsets, labels. Adds to `found`."""
    defect = None
    rows = {row["offset"]: row for row in _by_offset(task.rows)}
    num_rows = 0 if task.rows is None else len(task.rows)
    if task.rows is not None and num_rows != task.entry.samples:
        found.append(f"the index has {num_rows:,} samples, the manifest {task.entry.samples:,}")
    try:
        label_of = {
            f"{row['key']}.cls": row["label"] for row in rows.values() if row["label"] != NO_LABEL
        }
        for member in walk_tar(file.fileno(), end=os.fstat(file.fileno()).st_size):
            row = rows.pop(member.offset, None)
            if row is not None:
                if member.num_bytes != row["length"] or not _names(member.name, row, task.ours):
                    found.append(f"sample {row['key']!r}: is {member.name!r} in the tar")
            elif member.name in label_of:
                found += _label_problem(file, member, label_of.pop(member.name), task)
            elif task.ours and task.rows is not None:
                found.append(f"member {member.name!r} is not in the index")
        if task.ours:
            found += [f"{name!r} is missing" for name in label_of]
    except TarDefect as error:
        defect = error
    found += [f"sample {row['key']!r}: no member at {offset:,}" for offset, row in rows.items()]
    return defect


def _names(name: str, row: dict[str, Any], ours: bool) -> bool:
    if ours:
        return name == f"{row['key']}.{row['format']}"
    return name.startswith(row["key"] + ".")


def _label_problem(file: BinaryIO, member: TarMember, label: int, task: TarTask) -> list[str]:
    if not task.labels_stored:
        return []
    stored = os.pread(file.fileno(), min(member.num_bytes, MAX_LABEL_BYTES), member.offset)
    expected = str(label).encode()
    if (stored if task.ours else stored.strip()) == expected:
        return []
    return [f"{member.name!r} holds {stored!r}, but the index says {label}"]
