"""Locate ranges of saved tensors in the files of a checkpoint.

Owns: headers of tensor files, names of slices, and which bytes of which file hold a range.
Leaves out: reading tensors (`tensors`), verification (`folders`). Needs no torch.

One rank reads the header of a file; the table of it goes to the others. ZeRO 3 on 512 ranks makes
600,000 slices, hence arrays instead of one object per slice.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

SLICE = re.compile(r"(?P<name>.+)@(?P<start>\d+)/(?P<shape>[\dx]*)")
LENGTH_BYTES = 8


def slice_name(name: str, *, start: int, shape: Iterable[int]) -> str:
    """Name of a one-dimensional piece: elements from `start` of a tensor of `shape`, flattened."""
    return f"{name}@{start}/{'x'.join(map(str, shape))}"


class TensorPiece(NamedTuple):
    """Consecutive elements of a tensor in a file."""

    file: str
    offset: int
    """First byte in the file."""
    num_bytes: int
    dtype: str
    """As the file names it: F32, BF16, ..."""


@dataclass(frozen=True, kw_only=True)
class FileTable:
    """What one file holds."""

    file: str
    names: list[str]
    shapes: list[tuple[int, ...]]
    """Of the whole tensors."""
    dtypes: list[str]
    spans_N4: np.ndarray
    """int64 [N, 4]: first element, number of elements, first byte in the file, bytes."""


def read_table(path: Path) -> FileTable:
    """The table of a verified file. Raises OSError."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    names, shapes, spans = [], [], []
    for key, entry in header.items():
        piece = SLICE.fullmatch(key)
        first, last = entry["data_offsets"]
        shape, start = tuple(entry["shape"]), 0
        num_elements = math.prod(shape)
        if piece is not None:
            key, start = piece["name"], int(piece["start"])
            shape = tuple(int(size) for size in piece["shape"].split("x") if size)
        names.append(key)
        shapes.append(shape)
        spans.append((start, num_elements, LENGTH_BYTES + length + first, last - first))
    return FileTable(
        file=path.name,
        names=names,
        shapes=shapes,
        dtypes=[entry["dtype"] for entry in header.values()],
        spans_N4=np.array(spans, np.int64).reshape(-1, 4),
    )


class Catalogue:
    """The slices of all files of a checkpoint."""

    def __init__(self, tables: Iterable[FileTable]) -> None:
        self._files: list[str] = []
        self._numbers: dict[str, int] = {}
        self._shapes: list[tuple[int, ...]] = []
        self._dtypes: list[str] = []
        spans, owners = [np.empty((0, 4), np.int64)], [np.empty((0, 2), np.int32)]
        for table in tables:
            for name, shape, dtype in zip(table.names, table.shapes, table.dtypes, strict=True):
                if name not in self._numbers:
                    self._numbers[name] = len(self._numbers)
                    self._shapes.append(shape)
                    self._dtypes.append(dtype)
            owners.append(
                np.array(
                    [(self._numbers[name], len(self._files)) for name in table.names], np.int32
                ).reshape(-1, 2)
            )
            spans.append(table.spans_N4)
            self._files.append(table.file)
        all_owners, all_spans = np.concatenate(owners), np.concatenate(spans)
        order = np.lexsort((all_spans[:, 0], all_owners[:, 0]))
        self._file_of, self._spans = all_owners[order, 1], all_spans[order]
        # The slices of tensor i are the rows from first[i] to first[i + 1].
        self._first = np.searchsorted(all_owners[order, 0], np.arange(len(self._numbers) + 1))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._numbers)

    @property
    def num_bytes(self) -> int:
        """Memory of the slices, without the names."""
        return self._file_of.nbytes + self._spans.nbytes

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a whole tensor."""
        return self._shapes[self._numbers[name]]

    def pieces(self, name: str, *, start: int, num_elements: int) -> list[TensorPiece]:
        """Where the elements from `start` of a flattened tensor are, in order.

        The slices of a checkpoint cover every tensor, without overlaps.
        """
        number, stop = self._numbers[name], start + num_elements
        first, last = self._first[number], self._first[number + 1]
        spans_N4 = self._spans[first:last]
        begins, ends = spans_N4[:, 0], spans_N4[:, 0] + spans_N4[:, 1]
        found, at = [], start
        for row in np.flatnonzero((begins < stop) & (ends > start)).tolist():
            begin, count, offset, num_bytes = spans_N4[row].tolist()
            size = num_bytes // count
            here = min(stop, begin + count) - at
            assert begin <= at and here > 0, f"slices of {name} overlap or leave a hole at {at}"
            file = self._files[self._file_of[first + row]]
            found.append(
                TensorPiece(file, offset + (at - begin) * size, here * size, self._dtypes[number])
            )
            at += here
        assert at == stop, f"slices do not cover {name} beyond element {at}"
        return found
