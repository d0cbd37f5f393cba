"""Compare checkpoints and journals of two runs bit by bit.

Owns: which tensors, counters and metrics differ, and the rank that saved them. Memory for one chunk
of a tensor at a time. Needs no torch.
Leaves out: making the second run (`replaying`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vitscale.checkpoint.catalogue import Catalogue, FileTable, read_table
from vitscale.checkpoint.folders import Checkpoint
from vitscale.tracking.journal import read_rows

RANK_FILE = re.compile(r"rank-(\d+)\.safetensors")
CHUNK_BYTES = 1 << 24
# Group of the metrics that differ between equal runs: times, memory.
TIMES = "vitals/"
# dtype in files -> integers of its width, and floats to show values with; bf16 has none in numpy.
BITS = {8: "<u8", 4: "<u4", 2: "<u2", 1: "<u1"}
FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorDifference:
    """What differs in one tensor, or in the slice of it that one rank owns."""

    rank: int | None
    """Whose file has it; of several ranks that share a file, the first. None: not such a file."""
    name: str
    element: int
    """The first that differs, in the flattened whole tensor."""
    first: tuple[str, str]
    """Its value in the one and the other checkpoint."""
    num_unequal: int
    num_elements: int

    @property
    def text(self) -> str:
        who = "" if self.rank is None else f"rank {self.rank}: "
        return (
            f"{who}{self.name}, element {self.element}: {self.first[0]}, replay {self.first[1]} "
            f"({self.num_unequal:,} of {self.num_elements:,} elements differ)"
        )


def different_tensors(ours: Checkpoint, theirs: Checkpoint) -> list[TensorDifference]:
    """What differs between two verified checkpoints, by rank and in the order of their files.

    ours: its ranks are named. theirs may have another layout.
    Raises ValueError when they do not have the same tensors.
    """
    tables = [read_table(ours.folder / name) for name in ours.files]
    catalogue = Catalogue(read_table(theirs.folder / name) for name in theirs.files)
    own = Catalogue(tables)
    shapes = ({name: each.shape(name) for name in each.names} for each in (own, catalogue))
    if len({tuple(sorted(each.items())) for each in shapes}) > 1:
        raise ValueError("the checkpoints do not have the same tensors")
    found = [each for table in tables for each in _in_file(ours, table, theirs.folder, catalogue)]
    return sorted(found, key=lambda each: -1 if each.rank is None else each.rank)


def _in_file(
    ours: Checkpoint, table: FileTable, folder: Path, catalogue: Catalogue
) -> Iterator[TensorDifference]:
    match = RANK_FILE.fullmatch(table.file)
    rank = int(match[1]) if match else None
    data = _bytes_of(ours.folder / table.file)
    for name, dtype, span in zip(table.names, table.dtypes, table.spans_N4.tolist(), strict=True):
        start, count, offset, num_bytes = span
        if not count:
            continue
        width, difference, at = num_bytes // count, None, 0
        for piece in catalogue.pieces(name, start=start, num_elements=count):
            other = _bytes_of(folder / piece.file)
            for done in range(0, piece.num_bytes, CHUNK_BYTES):
                size = min(CHUNK_BYTES, piece.num_bytes - done)
                a = data[offset + at : offset + at + size].view(BITS[width])
                b = other[piece.offset + done : piece.offset + done + size].view(BITS[width])
                places = np.flatnonzero(a != b)
                if places.size and difference is None:
                    place = int(places[0])
                    difference = TensorDifference(
                        rank=rank,
                        name=name,
                        element=start + at // width + place,
                        first=(_shown(a[place], dtype), _shown(b[place], dtype)),
                        num_unequal=0,
                        num_elements=count,
                    )
                if difference is not None:
                    number = difference.num_unequal + int(places.size)
                    difference = replace(difference, num_unequal=number)
                at += size
        if difference is not None:
            yield difference


def _bytes_of(path: Path) -> np.ndarray:
    return np.memmap(path, np.uint8, mode="r")


def _shown(bits: Any, dtype: str) -> str:
    """A value and its bits, such as `0.25 (0x3e800000)`."""
    raw = np.asarray(bits)
    text = f"0x{int(raw):0{2 * raw.itemsize}x}"
    if dtype == "BF16":
        value = (raw.astype("<u4") << 16).view("<f4")
    elif dtype in FLOATS:
        value = raw.view(FLOATS[dtype])
    else:
        return text
    return f"{value[()]!s} ({text})"


def different_values(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """A line for each leaf of two trees of JSON values that is not equal."""
    a, b = dict(_leaves(ours, "")), dict(_leaves(theirs, ""))
    return [
        f"{key}: {a.get(key, 'absent')}, replay {b.get(key, 'absent')}"
        for key in {**a, **b}
        if repr(a.get(key, "absent")) != repr(b.get(key, "absent"))
    ]


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list) and value:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def journal_metrics(path: Path, *, after: int, until: int) -> dict[int, dict[str, float]]:
    """Metrics of the steps in (after, until] without times; empty without a journal."""
    found: dict[int, dict[str, float]] = {}
    if path.is_file():
        for row, _ in read_rows(path):
            if after < row.step <= until:
                kept = {k: v for k, v in row.metrics.items() if not k.startswith(TIMES)}
                found.setdefault(row.step, {}).update(kept)
    return {step: metrics for step, metrics in found.items() if metrics}
