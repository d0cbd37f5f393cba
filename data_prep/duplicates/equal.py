"""Find equal values among more of them than memory holds, by passes over all.

A pass looks at one part of the values, chosen by the values themselves, so that equal ones are in
the same part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

# Values of which a pass keeps some numbers, up to 20 bytes each.
PASS_ROWS = 1 << 25
PIECE_ROWS = 1 << 20


def repeated(
    values: Callable[[], Iterable[np.ndarray]], *, num: int
) -> Iterator[np.ndarray]:
    """Yield the values that occur more than once, sorted: those of each pass that has some.

    values: returns all of them again, uint64. num: how many there are.
    """
    num_parts = num // PASS_ROWS + 1
    for part in range(num_parts):
        of_part = [np.zeros(0, np.uint64)]
        for some in values():
            # Multiplied, since numbers of files may all be multiples of something.
            mixed = (some * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)
            of_part.append(some[mixed % np.uint64(num_parts) == part])
        found = np.sort(np.concatenate(of_part))
        again = np.unique(found[1:][found[1:] == found[:-1]])
        if len(again):
            yield again


def num_shared(one: np.ndarray, other: np.ndarray) -> int:
    """Count the values of `one` that are in `other`. Both uint64, evenly spread, such as hashes.

    They may be mapped from a file, since a pass keeps only a range of them.
    """
    num = 0
    num_parts = (len(one) + len(other)) // PASS_ROWS + 1
    for part in range(num_parts):
        first = np.uint64(part * 2**64 // num_parts)
        last = np.uint64((part + 1) * 2**64 // num_parts - 1)
        chosen = np.sort(_in_range(other, first, last))
        if len(chosen):
            num += len(among(_in_range(one, first, last), chosen))
    return num


def _in_range(values: np.ndarray, first: np.uint64, last: np.uint64) -> np.ndarray:
    pieces = np.array_split(values, len(values) // PIECE_ROWS + 1)
    return np.concatenate([each[(each >= first) & (each <= last)] for each in pieces])


def among(values: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Return the places of values that are among the chosen ones: sorted, and at least one."""
    nearest = np.take(chosen, np.searchsorted(chosen, values), mode="clip")
    return np.flatnonzero(nearest == values)


def note_equal(read: Callable[[], Iterable[np.ndarray]], first: np.ndarray) -> None:
    """Lower `first`, int64 per row, to the first row with an equal hash.

    read: returns all hashes again, uint64 [rows, 4].
    """
    for numbers in repeated(lambda: (part[:, 0] for part in read()), num=len(first)):
        places = []
        hashes = []
        start = 0
        for part in read():
            chosen = among(part[:, 0], numbers)
            places.append(chosen + start)
            hashes.append(part[chosen])
            start += len(part)
        rows = np.concatenate(places)
        equal = rows[first_equal(np.concatenate(hashes))]
        first[rows] = np.minimum(first[rows], equal)


def first_equal(rows: np.ndarray) -> np.ndarray:
    """int64 per row of `rows`, [N, M]: the first row that equals it."""
    num_bytes = rows.itemsize * rows.shape[1]
    # A row as one value of raw bytes, which `unique` compares as a whole.
    contents = np.ascontiguousarray(rows).view(f"V{num_bytes}").ravel()
    _, first, codes = np.unique(contents, return_index=True, return_inverse=True)
    first_of: np.ndarray = first[codes]
    return first_of
