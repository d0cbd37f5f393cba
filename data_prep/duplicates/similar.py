"""Describe images and find those that show the same picture as one before them.

Owns: the descriptor of an image; when two match: both have contrast, they share a key, and they
correlate, all of it direct, or all of it with one of them mirrored; the search by equal keys.
Leaves out: reading images (`reading`).

An image is shrunk to 32 x 32 grey values; the 64 lowest frequencies of its cosine transform are
kept, without the mean, as int16 [64]. Re-encoding and resizing hardly change them; mirroring
left-right inverts the sign of those with an odd horizontal frequency, so one descriptor covers both
orientations. Thresholds and what they catch: docs/duplicates.md; measured by
benchmarks/near_duplicates.py.

An image takes 128 bytes for its descriptor and 130 for its keys while they are sorted. All sums are
over integers below 2^53, exact in float64 in any order, so all machines agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np

from data_prep.duplicates.equal import first_equal
from vitscale.images.plain import grey_picture

NUM_FREQUENCIES = 64
SIDE_PX = 32
# Coefficients are stored in eighths of a grey value times SIDE_PX, which fits int16.
SCALE = 8
BASIS_SCALE = 1 << 14
# Standard deviation of the picture, in grey values of 255. Below it, rounding to 8 bits dominates:
# such images only match equal bytes.
MIN_CONTRAST = 4.0
# A bit of a key is set where a coefficient exceeds this share of the norm, divided by the
# frequency. With a threshold of 0, noise would set the bits of symmetric and smooth pictures.
BIT_THRESHOLD = 0.1
# A key has the bits of the 32 lowest frequencies; the 3 least certain ones are tried both ways.
KEY_BITS = 32
UNCERTAIN_BITS = 3
NUM_KEYS = 1 << UNCERTAIN_BITS
# Least correlation of the coefficients of two pictures.
MIN_CORRELATION = 0.99
BATCH_ROWS = 1 << 14
# Candidates per batch.
MAX_PAIRS = 1 << 14
# An image that has an earlier one so much alike is not compared any more: in a large family of
# copies few pairs are.
SETTLED = 0.9999


def describe_images(contents: Sequence[bytes]) -> tuple[np.ndarray, int]:
    """Return descriptors of encoded images, blank if undecodable, and how many are that."""
    # An image that cannot be decoded stays black, and so has no contrast.
    pictures = np.zeros((len(contents), SIDE_PX, SIDE_PX), np.uint8)
    num_lost = 0

    for number, content in enumerate(contents):
        picture = grey_picture(content, side=SIDE_PX)
        if picture is None:
            num_lost += 1
        else:
            pictures[number] = picture.pixels
    return picture_descriptors(pictures), num_lost


def picture_descriptors(pictures: np.ndarray) -> np.ndarray:
    """Descriptors of grey pictures, uint8 [N, SIDE_PX, SIDE_PX]."""
    basis, _, _ = _frequencies()
    # Each picture becomes a row, so that one product transforms all of them.
    flat = pictures.reshape(-1, SIDE_PX * SIDE_PX).astype(np.float64)
    return np.rint(flat @ basis * (SCALE / BASIS_SCALE)).astype(np.int16)


@cache
def _frequencies() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(basis [SIDE_PX^2, NUM_FREQUENCIES] as integers, frequency, sign when mirrored)."""
    positions = np.arange(SIDE_PX)
    # Rows are the basis functions of the orthonormal cosine transform (DCT-II).
    waves = np.cos(np.pi * positions[:, None] * (2 * positions + 1) / (2 * SIDE_PX))
    waves *= np.sqrt(2 / SIDE_PX)
    waves[0] /= np.sqrt(2)
    vertical, horizontal = (f.ravel() for f in np.indices((SIDE_PX, SIDE_PX)))
    squared = vertical**2 + horizontal**2
    # The first one, the mean, is left out.
    chosen = np.argsort(squared, kind="stable")[1 : NUM_FREQUENCIES + 1]
    basis = waves[vertical[chosen]][:, :, None] * waves[horizontal[chosen]][:, None, :]
    # Integers make the sums exact, and so the same on all machines.
    basis = np.rint(basis.reshape(NUM_FREQUENCIES, -1).T * BASIS_SCALE)
    return basis, np.sqrt(squared[chosen]), np.where(horizontal[chosen] % 2, -1.0, 1.0)


def has_contrast(descriptors: np.ndarray) -> np.ndarray:
    """Mark the descriptors with enough contrast to be compared; the others match nothing."""
    squares: np.ndarray = np.einsum(
        "ij,ij->i", descriptors, descriptors, dtype=np.int64
    )
    # By Parseval's theorem the squares of the coefficients add up to those of the pixels.
    return squares >= (MIN_CONTRAST * SCALE * SIDE_PX) ** 2


def keys_of(descriptors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Direct and mirrored keys, each uint32 [N, NUM_KEYS].

    Only images that share a key are compared: direct with direct, or direct with mirrored.
    """
    _, frequency, signs = _frequencies()
    # All combinations of the uncertain bits, each a column of 0 and 1.
    flips = (
        np.indices((2,) * UNCERTAIN_BITS)
        .reshape(UNCERTAIN_BITS, NUM_KEYS)
        .astype(np.uint32)
    )

    coefficients = descriptors.astype(np.float64)
    threshold = (
        np.sqrt((coefficients**2).sum(axis=1, keepdims=True))
        * BIT_THRESHOLD
        / frequency
    )

    found = []
    for values in (coefficients, coefficients * signs):
        # Each bit is uncertain by how close its coefficient is to the threshold.
        margins = (values - threshold)[:, :KEY_BITS]
        key = np.packbits(margins > 0, axis=1, bitorder="little").view("<u4")
        uncertain = np.argsort(np.abs(margins), axis=1, kind="stable")[
            :, :UNCERTAIN_BITS
        ]
        # The columns become masks of the bits to flip.
        masks = np.left_shift(np.uint32(1), uncertain.astype(np.uint32)) @ flips
        found.append(key ^ masks)
    return found[0], found[1]


def correlation(left: np.ndarray, right: np.ndarray, *, mirrored: bool) -> np.ndarray:
    """Correlate the pictures left[i] and right[i]; mirrored: after mirroring left[i]."""
    _, _, signs = _frequencies()
    a = left.astype(np.float64)
    b = right.astype(np.float64)
    if mirrored:
        a *= signs
    # A picture without contrast has norm 0, and correlates with nothing.
    norms = np.square(a).sum(axis=1) * np.square(b).sum(axis=1)
    alike: np.ndarray = (a * b).sum(axis=1) / np.sqrt(np.maximum(norms, 1))
    return alike


def nearest_similar(descriptors: np.ndarray) -> np.ndarray:
    """int64 per descriptor: the earlier one that correlates most with it, or its own position.

    Equal descriptors match the first of them; it alone is compared with others. Images without
    contrast match nothing.
    """
    positions = np.arange(len(descriptors))
    is_clear = has_contrast(descriptors)
    nearest = np.where(is_clear, first_equal(descriptors), positions)
    # Only one of equal descriptors is searched for; its copies follow from it.
    distinct = np.flatnonzero((nearest == positions) & is_clear)
    nearest[distinct] = distinct[_nearest(descriptors[distinct])]
    return nearest


def _nearest(descriptors: np.ndarray) -> np.ndarray:
    """Search among distinct descriptors that all have contrast."""
    num = len(descriptors)
    nearest = np.arange(num)
    best = np.full(num, MIN_CORRELATION)

    # The direct keys of all images, sorted, and the image of each.
    batches = [slice(start, start + BATCH_ROWS) for start in range(0, num, BATCH_ROWS)]
    keys = [keys_of(descriptors[rows])[0].ravel() for rows in batches]
    table = np.concatenate([np.zeros(0, np.uint32), *keys])
    owners = np.argsort(table, kind="stable")
    table = table[owners]
    owners //= NUM_KEYS

    # Every pair that shares a key comes up: from its direct key, or from a mirrored one.
    for rows in batches:
        for side, probes in enumerate(keys_of(descriptors[rows])):
            for probe, entry in _equal_keys(table, probes.ravel()):
                image = rows.start + probe // NUM_KEYS
                later = np.maximum(image, owners[entry])
                earlier = np.minimum(image, owners[entry])

                # A pair can share several keys: each is compared once.
                is_open = (earlier < later) & (best[later] < SETTLED)
                # One number for each pair, so that `unique` finds those that come up again.
                pairs = np.unique(later[is_open] * num + earlier[is_open])
                later, earlier = np.divmod(pairs, num)
                alike = correlation(
                    descriptors[later], descriptors[earlier], mirrored=side == 1
                )

                # The largest of an image is stored last, and so stays.
                order = np.argsort(alike, kind="stable")
                order = order[alike[order] >= best[later[order]]]
                nearest[later[order]] = earlier[order]
                best[later[order]] = alike[order]
    return nearest


def _equal_keys(
    table: np.ndarray, probes: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield every (position in probes, position in the sorted table) with equal keys."""
    start = np.searchsorted(table, probes, side="left")
    counts = np.searchsorted(table, probes, side="right") - start
    ends = np.cumsum(counts)
    num_pairs = int(ends[-1])

    # Frequent keys have many pairs, so memory is bounded by taking some at a time.
    for first in range(0, num_pairs, MAX_PAIRS):
        pair = np.arange(first, min(first + MAX_PAIRS, num_pairs))
        probe = np.searchsorted(ends, pair, side="right")
        # Numbers of pairs run over all probes; the difference is the number within its probe.
        yield probe, start[probe] + pair - (ends[probe] - counts[probe])
