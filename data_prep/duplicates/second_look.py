"""Compare two pictures that look alike at 32 x 32 pixels at 128 x 128: are they really copies?

Owns: the picture that is compared, and the test of a pair.
Leaves out: which pairs look alike (`similar`), and reading images (`reading`).

A scratch on a uniform surface, or the sign in an icon, is not among the 64 frequencies of a
descriptor. Copies differ everywhere by what encoding and resizing explain; other pictures differ by
more than that somewhere. Brightness and contrast are divided out, and a copy may lack a narrow
border. Thresholds: docs/duplicates.md; measured by benchmarks/near_duplicates.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps

from data_prep.duplicates.similar import grey_picture

SIDE_PX = 128
# Read larger, so that parts can be cut out of it without a loss of detail.
READ_PX = 256
# Border that a copy may lack, as a share of the picture, and steps of the search for it.
MAX_BORDER = 0.04
ALIGNMENTS = 4
# Smaller pictures are compared at the size of the smaller one.
MIN_SIDE_PX = 32
BLOCK_PX = 8
BLUR_PX = 5
# Largest difference of a block, as a share of its own detail plus NOISE grey values, about what
# JPEG of quality 30 changes in smooth parts.
MAX_BLOCK_DIFFERENCE = 1.1
NOISE = 2.5
# A block with at least STRONG_DETAIL grey values of detail has this share of it in a copy too.
# Details finer than 2 x 2 pixels do not count: resizing removes them.
STRONG_DETAIL = 5.0
MIN_DETAIL_SHARE = 0.4
GAINS = (0.5, 2.0)


class Look(NamedTuple):
    """One picture, grey and upright."""

    pixels: np.ndarray
    """uint8 [READ_PX, READ_PX]."""
    short_side: int
    """Of the image itself, in pixels."""


def look_at(content: bytes) -> Look | None:
    """The picture of an encoded image; None if it cannot be decoded."""
    found = grey_picture(content, side=READ_PX)
    return None if found is None else Look(*found)


def nearly_equal(left: Look | None, right: Look | None) -> bool:
    """Return True if both show the same picture, directly or mirrored left-right.

    One of them may be the other without a narrow border.
    """
    if left is None or right is None:
        return False
    side = min(SIDE_PX, max(MIN_SIDE_PX, min(left.short_side, right.short_side)))
    a = Image.fromarray(left.pixels)
    b = Image.fromarray(right.pixels)
    whole_a = _part(a, _whole(a), side)
    nearer = max(
        (b, ImageOps.mirror(b)),
        key=lambda each: _correlation(whole_a, _part(each, _whole(each), side)),
    )
    return any(_same_grey(*pair) for pair in _aligned(a, nearer, side))


Box = tuple[float, float, float, float]
"""Left, top, right and bottom."""


def _whole(image: Image.Image) -> Box:
    return 0, 0, *image.size


def _part(image: Image.Image, box: Box, side: int) -> np.ndarray:
    """A part of a picture, float64 [side, side]."""
    small = image.resize((side, side), Image.Resampling.BILINEAR, box=box)
    return np.asarray(small, dtype=np.float64)


def _aligned(a: Image.Image, b: Image.Image, side: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the two as they are; a where b shows it; b where a shows it: float64 [side, side]."""
    both = _part(a, _whole(a), side), _part(b, _whole(b), side)
    yield both
    yield _part(a, _box_of(both[1], a), side), both[1]
    yield both[0], _part(b, _box_of(both[0], b), side)


def _box_of(part: np.ndarray, image: Image.Image) -> Box:
    """The box of a picture that another one shows, at most MAX_BORDER of each side smaller.

    Least squares over the place of each border, linearised again and again (Lucas and Kanade 1981).
    """
    side, wide = len(part), image.width
    step = wide / side
    target = _normalized(part)
    along = (np.arange(side) + 0.5) / side
    borders = np.array([0.0, 0.0, wide, wide])
    lowest = np.array([0, 0, 1 - MAX_BORDER, 1 - MAX_BORDER]) * wide
    highest = np.array([MAX_BORDER, MAX_BORDER, 1, 1]) * wide
    for _ in range(ALIGNMENTS):
        now = _normalized(_part(image, tuple(borders), side))
        down, right = np.gradient(now)
        slopes = [
            right * (1 - along),
            down * (1 - along)[:, None],
            right * along,
            down * along[:, None],
        ]
        matrix = np.stack([slope.ravel() for slope in slopes], axis=1)
        normal = matrix.T @ matrix, matrix.T @ (target - now).ravel()
        moved = np.linalg.lstsq(*normal, rcond=None)[0]
        borders = np.clip(borders + moved * step, lowest, highest)
    return tuple(borders)


def _normalized(values: np.ndarray) -> np.ndarray:
    blurred = _blurred(values)
    return (blurred - blurred.mean()) / max(blurred.std(), 1e-9)


def _same_grey(a: np.ndarray, b: np.ndarray) -> bool:
    # Contrast is that of blurred pictures: detail that a copy lost must not count as contrast.
    gain = _blurred(a).std() / max(_blurred(b).std(), 1e-9)
    a = a - a.mean()
    b = (b - b.mean()) * np.clip(gain, *GAINS)
    fine_a = a - _blurred(a)
    fine_b = b - _blurred(b)

    strong_a = np.sqrt(_blocks(_smoothed(fine_a) ** 2))
    strong_b = np.sqrt(_blocks(_smoothed(fine_b) ** 2))
    more = np.maximum(strong_a, strong_b)
    less = np.minimum(strong_a, strong_b)
    if ((more >= STRONG_DETAIL) & (less < MIN_DETAIL_SHARE * more)).any():
        return False

    detail = np.sqrt(np.maximum(_blocks(fine_a**2), _blocks(fine_b**2)))
    difference = np.sqrt(_blocks((a - b) ** 2))
    return bool((difference <= MAX_BLOCK_DIFFERENCE * (detail + NOISE)).all())


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    a = a - a.mean()
    b = b - b.mean()
    return float((a * b).sum() / np.sqrt(max((a * a).sum() * (b * b).sum(), 1e-9)))


def _blocks(values: np.ndarray) -> np.ndarray:
    """Means over blocks of BLOCK_PX; rows and columns beyond the last whole block are left out."""
    num = len(values) // BLOCK_PX
    cut = values[: num * BLOCK_PX, : num * BLOCK_PX]
    means: np.ndarray = cut.reshape(num, BLOCK_PX, num, BLOCK_PX).mean(axis=(1, 3))
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
