"""Find copies among the images of a corpus, all of whose descriptors are in memory.

Owns: grouping equal rows, and the search for similar pictures by the keys that copies share.
Leaves out: when two images match (`descriptors`), reading images (`reading`).

An image takes 128 bytes for its descriptor and 130 for its keys while they are sorted.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from data_prep.duplicates.descriptors import (
    NUM_KEYS,
    has_contrast,
    keys_of,
    pictures_correlate,
)

BATCH_ROWS = 1 << 14
# Candidates per batch. What one batch settles, the next ones do not compare again, so in a large
# family of copies few pairs are compared.
MAX_PAIRS = 1 << 14


def first_equal(rows: np.ndarray) -> np.ndarray:
    """int64 per row of `rows`, uint64 [N, words]: the first row that equals it."""
    order = np.lexsort(rows.T[::-1])
    ordered = rows[order]
    new = np.ones(len(rows), dtype=bool)
    new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    first = np.empty(len(rows), dtype=np.int64)
    first[order] = order[new][np.cumsum(new) - 1]
    return first


def first_similar(descriptors: np.ndarray) -> np.ndarray:
    """int64 per descriptor: the first one that shows the same picture, or its own position.

    Equal descriptors match the first of them; it alone is compared with others. Images without
    contrast match nothing.
    """
    found = first_equal(np.ascontiguousarray(descriptors).view(np.uint64))
    own = np.arange(len(descriptors))
    blank = ~has_contrast(descriptors)
    found[blank] = own[blank]
    distinct = np.flatnonzero((found == own) & ~blank)
    found[distinct] = distinct[_first_matches(descriptors[distinct])]
    return found


def _first_matches(descriptors: np.ndarray) -> np.ndarray:
    """Do the same for different descriptors with contrast."""
    num = len(descriptors)
    first = np.arange(num)
    batches = [slice(start, start + BATCH_ROWS) for start in range(0, num, BATCH_ROWS)]
    keys = [keys_of(descriptors[rows])[0].ravel() for rows in batches]
    table = np.concatenate([np.zeros(0, np.uint32), *keys])
    owners = np.argsort(table, kind="stable")
    table = table[owners]
    owners //= NUM_KEYS
    for rows in batches:
        for side, probes in enumerate(keys_of(descriptors[rows])):
            for probe, entry in _equal_keys(table, probes.ravel()):
                a, b = owners[entry], rows.start + probe // NUM_KEYS
                later, earlier = np.maximum(a, b), np.minimum(a, b)
                new = earlier < first[later]
                pairs = np.unique(later[new] * num + earlier[new])
                later, earlier = np.divmod(pairs, num)
                same = pictures_correlate(
                    descriptors[later], descriptors[earlier], mirrored=side == 1
                )
                np.minimum.at(first, later[same], earlier[same])
    return first


def _equal_keys(table: np.ndarray, probes: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield every (position in probes, position in the sorted table) with equal keys."""
    start = np.searchsorted(table, probes, side="left")
    counts = np.searchsorted(table, probes, side="right") - start
    ends = np.cumsum(counts)
    for first in range(0, int(ends[-1]), MAX_PAIRS):
        pair = np.arange(first, min(first + MAX_PAIRS, int(ends[-1])))
        probe = np.searchsorted(ends, pair, side="right")
        yield probe, start[probe] + pair - (ends[probe] - counts[probe])
