"""Partition and sort fixed-size rows on disk, with parts that fit in memory.

Owns: files of numpy records, appended in any order and read part by part, and sorting more rows
than fit in memory.
Leaves out: what the rows mean. Files are scratch: neither flushed to disk nor given a final name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

SAMPLES_PER_PART = 64


class Parts:
    """`num` files of records of one dtype."""

    def __init__(self, folder: Path, dtype: np.dtype, *, num: int) -> None:
        folder.mkdir()
        self.dtype, self.num, self.num_rows = dtype, num, 0
        self._paths = [folder / f"{number:05d}" for number in range(num)]

    def add(self, rows: np.ndarray, part_of: np.ndarray | None = None) -> None:
        """Append rows; part_of[i] is the part of rows[i]."""
        assert rows.dtype == self.dtype
        self.num_rows += len(rows)
        if part_of is None or self.num == 1:
            self._append(0, rows)
            return
        order = np.argsort(part_of, kind="stable")
        ends = np.cumsum(np.bincount(part_of, minlength=self.num))
        for number in np.unique(part_of):
            first = ends[number - 1] if number else 0
            self._append(number, rows[order[first : ends[number]]])

    def _append(self, number: int, rows: np.ndarray) -> None:
        # Opened each time: there may be more parts than open files allowed.
        with open(self._paths[number], "ab") as file:
            file.write(rows.tobytes())

    def chunks(self, number: int, *, max_bytes: int) -> Iterator[np.ndarray]:
        """Rows of one part, in pieces of at most `max_bytes`."""
        max_rows = max(1, max_bytes // self.dtype.itemsize)
        if not self._paths[number].exists():
            return
        with open(self._paths[number], "rb") as file:
            while data := file.read(max_rows * self.dtype.itemsize):
                yield np.frombuffer(data, dtype=self.dtype)

    def path(self, number: int) -> Path:
        return self._paths[number]

    def remove(self, number: int) -> None:
        self._paths[number].unlink(missing_ok=True)


def parts_needed(num_bytes: int, *, part_bytes: int) -> int:
    return max(1, -(-num_bytes // part_bytes))


def sorted_rows(
    rows: Parts, folder: Path, *, by: Sequence[str], part_bytes: int
) -> Iterator[np.ndarray]:
    """The rows of all parts in ascending order of the fields `by`, in pieces.

    Rows with an equal first field are in one piece. Pieces are about as large as a part, unless
    very many rows share a first field.
    """
    num = parts_needed(rows.num_rows * rows.dtype.itemsize, part_bytes=part_bytes)
    stride = max(1, rows.num_rows // (SAMPLES_PER_PART * num))
    samples = [chunk[by[0]][::stride] for chunk in _all_chunks(rows, part_bytes)]
    ordered = np.sort(np.concatenate([np.zeros(0, rows.dtype[by[0]]), *samples]))
    cuts = ordered[np.arange(1, num) * len(ordered) // num]
    ranges = Parts(folder, rows.dtype, num=num)
    for chunk in _all_chunks(rows, part_bytes):
        ranges.add(chunk, np.searchsorted(cuts, chunk[by[0]], side="right"))
    for number in range(num):
        pieces = list(ranges.chunks(number, max_bytes=part_bytes))
        if pieces:
            piece = np.concatenate(pieces)
            yield piece[np.lexsort([piece[name] for name in reversed(by)])]
        ranges.remove(number)


def _all_chunks(rows: Parts, max_bytes: int) -> Iterator[np.ndarray]:
    for number in range(rows.num):
        yield from rows.chunks(number, max_bytes=max_bytes)
