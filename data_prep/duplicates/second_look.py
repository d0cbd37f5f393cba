"""Compare two pictures at 128 x 128 pixels: are likely copies really copies?

Owns: the picture that is compared (`Look`), the test of a pair, and the verdict on a list of likely
copies.
Leaves out: which pairs are likely (`descriptors`, `search`), where images come from.

A descriptor sees 64 frequencies of 32 x 32 pixels: a scratch on a uniform surface or the sign in an
icon is not among them. Here copies differ by what encoding and resizing explain, everywhere; other
pictures differ more than that somewhere, or their finest details do not correlate. Brightness and
contrast are divided out. Thresholds: docs/duplicates.md, by benchmarks/near_duplicates.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from PIL import Image

from data_prep.duplicates.descriptors import read_picture

SIDE_PX = 128
# Smaller pictures are compared at the size of the smaller one.
MIN_SIDE_PX = 32
BLOCK_PX = 8
BLUR_PX = 5
# Largest difference of a block, as a share of its own detail plus NOISE grey values, which is what
# JPEG of quality 30 changes in smooth parts.
MAX_BLOCK_DIFFERENCE = 1.1
NOISE = 3.0
# A block with at least STRONG_DETAIL grey values of detail has this share of it in a copy too.
# Details finer than 2 x 2 pixels do not count: resizing removes them.
STRONG_DETAIL = 5.0
MIN_DETAIL_SHARE = 0.4
# Correlation of the details; below MIN_DETAIL grey values they are noise of the encoder.
MIN_DETAIL_CORRELATION = 0.4
MIN_DETAIL = 1.5
# Of a block's mean Cb and Cr; a picture within GREY of grey is compared without colours.
MAX_COLOUR_DIFFERENCE = 32.0
GREY = 4.0
GAINS = (0.5, 2.0)
# Likely originals compared with each likely copy, lowest rank first.
MAX_CANDIDATES = 4
# Then it is compared with so many others that look like the same original and are no copies of it.
MAX_RELATIVES = 16
LOOKS_IN_MEMORY = 64


@dataclass(frozen=True, slots=True)
class Look:
    """One picture, upright, in YCbCr."""

    pixels: np.ndarray
    """uint8 [SIDE_PX, SIDE_PX, 3]."""
    short_side: int
    """Of the image itself, in pixels."""


def look_at(content: bytes, *, max_pixels: int | None = None) -> Look | None:
    """The picture of an encoded image; None if it cannot be decoded."""
    found = read_picture(content, mode="YCbCr", side=SIDE_PX, max_pixels=max_pixels)
    return None if found is None else Look(*found)


def nearly_equal(left: Look | None, right: Look | None) -> bool:
    """Whether both show the same picture, directly or mirrored left-right."""
    if left is None or right is None:
        return False
    side = min(SIDE_PX, max(MIN_SIDE_PX, min(left.short_side, right.short_side)))
    a, b = (_at(look, side) for look in (left, right))
    mirrored = b[:, ::-1]
    nearer = max((b, mirrored), key=lambda other: _correlation(a[..., 0], other[..., 0]))
    return _same_colours(a[..., 1:], nearer[..., 1:]) and _same_grey(a[..., 0], nearer[..., 0])


def _at(look: Look, side: int) -> np.ndarray:
    """float64 [side, side, 3]"""
    image = Image.fromarray(look.pixels, mode="YCbCr")
    return np.asarray(image.resize((side, side), Image.Resampling.BOX), dtype=np.float64)


def _same_colours(a: np.ndarray, b: np.ndarray) -> bool:
    a, b = _blocks(a) - 128, _blocks(b) - 128
    if min(np.abs(a).max(), np.abs(b).max()) <= GREY:
        return True
    return bool(np.abs(a - b).max() <= MAX_COLOUR_DIFFERENCE)


def _same_grey(a: np.ndarray, b: np.ndarray) -> bool:
    a, b = a - a.mean(), b - b.mean()
    blurred_a, blurred_b = _blurred(a), _blurred(b)
    # Of blurred pictures: detail lost in a copy must not count as lost contrast.
    gain = np.clip(blurred_a.std() / max(blurred_b.std(), 1e-9), *GAINS)
    fine_a, fine_b = a - blurred_a, gain * (b - blurred_b)
    b = gain * b
    coarse_a, coarse_b = (np.sqrt(_blocks(_smoothed(fine) ** 2)) for fine in (fine_a, fine_b))
    more, less = np.maximum(coarse_a, coarse_b), np.minimum(coarse_a, coarse_b)
    if ((more >= STRONG_DETAIL) & (less < MIN_DETAIL_SHARE * more)).any():
        return False
    detail = np.sqrt(np.maximum(_blocks(fine_a**2), _blocks(fine_b**2)))
    difference = np.sqrt(_blocks((a - b) ** 2))
    if (difference > MAX_BLOCK_DIFFERENCE * (detail + NOISE)).any():
        return False
    if np.sqrt(min((fine_a**2).mean(), (fine_b**2).mean())) < MIN_DETAIL:
        return True
    return _correlation(fine_a, fine_b) >= MIN_DETAIL_CORRELATION


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a - a.mean(), b - b.mean()
    return float((a * b).sum() / np.sqrt(max((a * a).sum() * (b * b).sum(), 1e-9)))


def _blocks(values: np.ndarray) -> np.ndarray:
    """Means over blocks of BLOCK_PX; rows and columns beyond the last whole block are left out."""
    num = len(values) // BLOCK_PX
    cut = values[: num * BLOCK_PX, : num * BLOCK_PX]
    means: np.ndarray = cut.reshape(num, BLOCK_PX, num, BLOCK_PX, -1).mean(axis=(1, 3))
    return means


def _smoothed(values: np.ndarray) -> np.ndarray:
    """Means of each pixel with those right of it and below; the border is repeated."""
    wide = np.pad(values, ((0, 1), (0, 1)), mode="edge")
    rows = wide[:-1] + wide[1:]
    means: np.ndarray = (rows[:, :-1] + rows[:, 1:]) / 4
    return means


def _blurred(values: np.ndarray) -> np.ndarray:
    """Means over BLUR_PX x BLUR_PX pixels; the border is repeated."""
    half = BLUR_PX // 2
    sums = np.pad(values, ((half + 1, half),) * 2, mode="edge").cumsum(axis=0).cumsum(axis=1)
    n = BLUR_PX
    whole: np.ndarray = sums[n:, n:] - sums[:-n, n:] - sums[n:, :-n] + sums[:-n, :-n]
    return whole / n**2


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one likely copy."""

    rank: int
    kept_rank: int
    """The lowest original that is nearly equal; if there is none, the lowest likely one."""
    is_copy: bool


def verdicts(
    candidates: dict[int, list[int]], look: Callable[[int], Look | None]
) -> Iterator[Verdict]:
    """Compare each likely copy with its likely originals, rank -> kept ranks in order.

    Of pictures that all look like one original and differ from it, copies of each other are found
    too, whatever the number of their likely originals.
    """
    look = lru_cache(maxsize=LOOKS_IN_MEMORY)(look)
    relatives: dict[int, list[int]] = {}
    for rank, originals in candidates.items():
        family = relatives.setdefault(originals[0], [])
        others = [*originals, *(other for other in family if other not in originals)]
        equal = (other for other in others if nearly_equal(look(rank), look(other)))
        found = next(equal, None)
        if found is None and len(family) < MAX_RELATIVES:
            family.append(rank)
        yield Verdict(rank, originals[0] if found is None else found, found is not None)
