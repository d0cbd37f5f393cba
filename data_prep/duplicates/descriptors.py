"""Describe images and decide whether two of them show the same picture.

Owns: the descriptor of an image, and the conditions of a pair: both have contrast, they share a
key, and they correlate, all of it direct, or all of it with one of them mirrored.
Leaves out: which images are compared (`search`).

An image is shrunk to 32 x 32 grey values; the 64 lowest frequencies of its cosine transform are
kept, without the mean, as int16 [64]. Re-encoding and resizing hardly change them; mirroring
left-right inverts the sign of those with an odd horizontal frequency, so one descriptor covers both
orientations. Thresholds and what they catch: docs/duplicates.md; measured by
benchmarks/near_duplicates.py.

All sums are over integers below 2^53, exact in float64 in any order, so all machines agree.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import cache

import numpy as np
from PIL import Image

from data_prep.images.check import SUFFIXES
from vitscale.images.plain import orientation, plain, upright

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
# Correlation of the coefficients of two pictures, unweighted, and weighted by frequency, which
# raises the weight of details.
MIN_CORRELATION = 0.99
MIN_DETAIL_CORRELATION = 0.985
# A difference in detail up to this, in grey values, counts as encoding noise: faint smooth pictures
# have little detail of their own.
MAX_NOISE = 2.0
MAX_PIXELS = 1 << 28


def describe_images(contents: Sequence[bytes]) -> tuple[np.ndarray, int]:
    """Return descriptors of encoded images, blank if undecodable, and how many are that."""
    pictures = [grey_picture(content) for content in contents]
    blank = np.zeros((SIDE_PX, SIDE_PX), np.uint8)
    found = [blank if picture is None else picture for picture in pictures]
    return picture_descriptors(np.array(found)), sum(picture is None for picture in pictures)


def grey_picture(content: bytes) -> np.ndarray | None:
    """SIDE_PX x SIDE_PX grey values, upright, transparent pixels white.

    None if the image cannot be decoded or has more than MAX_PIXELS.
    """
    # MAX_PIXELS replaces Pillow's own limit.
    Image.MAX_IMAGE_PIXELS = None
    try:
        with Image.open(io.BytesIO(content), formats=tuple(SUFFIXES)) as image:
            if image.width * image.height > MAX_PIXELS:
                return None
            # JPEG decoders downscale by 2, 4 or 8 at almost no cost. The last block may be partly
            # filled, hence the box, which is the true extent of the picture.
            drafted = image.draft("L", (2 * SIDE_PX, 2 * SIDE_PX))
            turn = orientation(image)
            grey = plain(image).convert("L")
            small = grey.resize(
                (SIDE_PX, SIDE_PX),
                Image.Resampling.BILINEAR,
                box=drafted[1] if drafted else None,
                reducing_gap=3.0,
            )
    except MemoryError:
        raise
    except Exception:
        # Pillow raises OSError, SyntaxError, ValueError, struct.error ... on broken content.
        return None
    return np.asarray(upright(small, turn))


def picture_descriptors(pictures: np.ndarray) -> np.ndarray:
    """Descriptors of grey pictures, uint8 [N, SIDE_PX, SIDE_PX]."""
    basis, _, _ = _frequencies()
    flat = pictures.reshape(-1, SIDE_PX * SIDE_PX).astype(np.float64)
    return np.rint(flat @ basis * (SCALE / BASIS_SCALE)).astype(np.int16)


@cache
def _frequencies() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(basis [SIDE_PX^2, NUM_FREQUENCIES] as integers, frequency, sign when mirrored)."""
    positions = np.arange(SIDE_PX)
    waves = np.cos(np.pi * positions[:, None] * (2 * positions + 1) / (2 * SIDE_PX))
    waves *= np.sqrt(2 / SIDE_PX)
    waves[0] /= np.sqrt(2)
    vertical, horizontal = (f.ravel() for f in np.indices((SIDE_PX, SIDE_PX)))
    squared = vertical**2 + horizontal**2
    # The first one, the mean, is left out.
    chosen = np.argsort(squared, kind="stable")[1 : NUM_FREQUENCIES + 1]
    basis = waves[vertical[chosen]][:, :, None] * waves[horizontal[chosen]][:, None, :]
    basis = np.rint(basis.reshape(NUM_FREQUENCIES, -1).T * BASIS_SCALE)
    return basis, np.sqrt(squared[chosen]), np.where(horizontal[chosen] % 2, -1.0, 1.0)


def has_contrast(descriptors: np.ndarray) -> np.ndarray:
    """Which descriptors have enough contrast to be compared; the others match nothing."""
    squares: np.ndarray = np.einsum("ij,ij->i", descriptors, descriptors, dtype=np.int64)
    return squares >= (MIN_CONTRAST * SCALE * SIDE_PX) ** 2


def keys_of(descriptors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Direct and mirrored keys, each uint32 [N, NUM_KEYS].

    Only images that share a key are compared: direct with direct, or direct with mirrored.
    """
    _, frequency, signs = _frequencies()
    flips = np.indices((2,) * UNCERTAIN_BITS).reshape(UNCERTAIN_BITS, NUM_KEYS).astype(np.uint32)
    coefficients = descriptors.astype(np.float64)
    threshold = np.sqrt((coefficients**2).sum(axis=1, keepdims=True)) * BIT_THRESHOLD / frequency
    found = []
    for values in (coefficients, coefficients * signs):
        margins = (values - threshold)[:, :KEY_BITS]
        key = np.packbits(margins > 0, axis=1, bitorder="little").view("<u4")
        uncertain = np.argsort(np.abs(margins), axis=1, kind="stable")[:, :UNCERTAIN_BITS]
        masks = np.left_shift(np.uint32(1), uncertain.astype(np.uint32)) @ flips
        found.append(key ^ masks)
    return found[0], found[1]


def pictures_correlate(left: np.ndarray, right: np.ndarray, *, mirrored: bool) -> np.ndarray:
    """Whether descriptors left[i] and right[i] correlate; mirrored: with left[i] mirrored."""
    _, frequency, signs = _frequencies()
    a, b = left.astype(np.float64), right.astype(np.float64)
    a = a * signs if mirrored else a
    same = _correlation(a, b) >= MIN_CORRELATION
    a, b = np.rint(a * frequency), np.rint(b * frequency)
    noise = (MAX_NOISE * SCALE) ** 2 * (frequency**2).sum()
    details = _correlation(a, b) >= MIN_DETAIL_CORRELATION
    alike: np.ndarray = same & (details | (((a - b) ** 2).sum(axis=1) <= noise))
    return alike


def similarity(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Correlation of descriptors left[i] and right[i], direct or mirrored, which is larger."""
    _, _, signs = _frequencies()
    a, b = left.astype(np.float64), right.astype(np.float64)
    return np.maximum(_correlation(a, b), _correlation(a * signs, b))


def _correlation(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    product = (a * b).sum(axis=1)
    norms = (a * a).sum(axis=1) * (b * b).sum(axis=1)
    return product / np.sqrt(np.maximum(norms, 1))
