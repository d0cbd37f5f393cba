"""Find copies among the images of a corpus, all of whose descriptors are in memory.

Owns: grouping equal rows, and the search for similar pictures by the keys that copies share.
Leaves out: when two images match (`descriptors`), reading images (`reading`).

Keys are joined in NUM_RANGES parts, one after the other. An image takes 144 bytes for its
descriptor, 64 for its keys, and 30 while a part is sorted.
"""

from __future__ import annotations

import numpy as np

from data_prep.duplicates.descriptors import (
    DESCRIPTOR,
    HASHES,
    NUM_KEYS,
    equal_keys,
    has_contrast,
    hashes_near,
    keys_of,
    pictures_correlate,
)

RANGE_BITS = 4
NUM_RANGES = 1 << RANGE_BITS
# Keys of common pictures are close together; an odd multiplier spreads them over the ranges.
SPREAD = np.uint32(0x9E3779B1)
MAX_PAIRS = 1 << 17
BATCH_ROWS = 1 << 14


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
    words = np.ascontiguousarray(descriptors).view("<u8")
    found = first_equal(words.reshape(-1, DESCRIPTOR.itemsize // 8))
    own = np.arange(len(descriptors))
    blank = ~has_contrast(descriptors)
    found[blank] = own[blank]
    distinct = np.flatnonzero((found == own) & ~blank)
    matches = _first_matches(descriptors[distinct])
    found[distinct] = distinct[matches]
    return found


def _first_matches(descriptors: np.ndarray) -> np.ndarray:
    """Do the same for different descriptors with contrast."""
    num = len(descriptors)
    first = np.arange(num)
    keys = [np.empty((num, NUM_KEYS), np.uint32) for _ in HASHES]
    for start in range(0, num, BATCH_ROWS):
        rows = slice(start, start + BATCH_ROWS)
        for all_keys, some in zip(keys, keys_of(descriptors[rows]), strict=True):
            all_keys[rows] = some
    for number in range(NUM_RANGES):
        inside = [
            np.flatnonzero((k * SPREAD >> np.uint32(32 - RANGE_BITS)) == number) for k in keys
        ]
        table = keys[0].ravel()[inside[0]]
        order = np.argsort(table, kind="stable")
        table, owners = table[order], inside[0][order] // NUM_KEYS
        for side, name in enumerate(HASHES):
            probes, probe_owners = keys[side].ravel()[inside[side]], inside[side] // NUM_KEYS
            for probe, entry in equal_keys(table, probes, max_pairs=MAX_PAIRS):
                a, b = owners[entry], probe_owners[probe]
                near = hashes_near(descriptors[HASHES[0]][a], descriptors[name][b]) & (a != b)
                _settle(first, descriptors, a[near], b[near], mirrored=side == 1)
    return first


def _settle(
    first: np.ndarray, descriptors: np.ndarray, a: np.ndarray, b: np.ndarray, *, mirrored: bool
) -> None:
    """Lower `first` to the first of these candidates that correlate.

    The first candidates of an image are compared first, and later ones only if these do not match:
    in a large family of copies one comparison settles nearly every image.
    """
    pairs = np.unique(np.maximum(a, b) * len(first) + np.minimum(a, b))
    later, earlier = np.divmod(pairs, len(first))
    width = 1
    while True:
        open_ = earlier < first[later]
        later, earlier = later[open_], earlier[open_]
        if not len(later):
            return
        starts = np.flatnonzero(np.r_[True, later[1:] != later[:-1]])
        place = np.arange(len(later)) - np.repeat(starts, np.diff(np.r_[starts, len(later)]))
        tried = place < width
        same = pictures_correlate(
            descriptors[later[tried]],
            descriptors[earlier[tried]],
            mirrored=np.full(int(tried.sum()), mirrored),
        )
        np.minimum.at(first, later[tried][same], earlier[tried][same])
        later, earlier = later[~tried], earlier[~tried]
        width *= 4
