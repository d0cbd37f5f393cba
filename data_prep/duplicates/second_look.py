"""Compare two pictures that look alike at 32 x 32 pixels at 128 x 128: are they really copies?

Owns: the picture that is compared, and the test of a pair.
Leaves out: which pairs look alike (`similar`), and reading images (`reading`).

A scratch on a uniform surface, or the sign in an icon, is not among the 64 frequencies of a
descriptor. Copies differ everywhere by what encoding and resizing explain; other pictures differ by
more than that somewhere. Brightness and contrast are divided out, and a copy may lack a narrow
border. Thresholds: docs/duplicates.md; measured by benchmarks/near_duplicates.py.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
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
MAX_BLOCK_DIFFERENCE = 1.2
NOISE = 2.5
# A block with at least STRONG_DETAIL grey values of detail has this share of it in a copy too.
# Details finer than 2 x 2 pixels do not count: resizing removes them.
STRONG_DETAIL = 4.0
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
    whole_a = _part(a, side)
    # Both have the same brightness and contrast, so the smaller difference is of the right one.
    b = min((b, ImageOps.mirror(b)), key=lambda each: np.square(whole_a - _part(each, side)).sum())
    whole_b = _part(b, side)
    return (
        _same_grey(whole_a, whole_b)
        or _same_grey(_part(a, side, box=_box_of(whole_b, a)), whole_b)
        or _same_grey(whole_a, _part(b, side, box=_box_of(whole_a, b)))
    )


Box = tuple[float, float, float, float]
"""Left, top, right and bottom."""


def _part(image: Image.Image, side: int, *, box: Box | None = None) -> np.ndarray:
    """A picture, or a part of it, float64 [side, side]."""
    small = image.resize((side, side), Image.Resampling.BILINEAR, box=box)
    return np.asarray(small, dtype=np.float64)


def _box_of(part: np.ndarray, image: Image.Image) -> Box:
    """The box of a picture that another one shows, at most MAX_BORDER of each side smaller.

    Least squares over the place of each border, linearised again and again (Lucas and Kanade 1981).
    """
    side = len(part)
    target = _normalized(part)
    along = (np.arange(side) + 0.5) / side
    whole = np.array([0, 0, image.width, image.width])
    inner = whole + np.array([1, 1, -1, -1]) * MAX_BORDER * image.width
    lowest = np.minimum(whole, inner)
    highest = np.maximum(whole, inner)
    borders = whole
    for _ in range(ALIGNMENTS):
        now = _normalized(_part(image, side, box=tuple(borders)))
        down, right = np.gradient(now)
        across = right * along
        below = down * along[:, None]
        slopes = np.stack([right - across, down - below, across, below], axis=-1).reshape(-1, 4)
        moved = np.linalg.lstsq(slopes, (target - now).ravel())[0]
        borders = np.clip(borders + moved * image.width / side, lowest, highest)
    return tuple(borders)


def _normalized(values: np.ndarray) -> np.ndarray:
    blurred = _means(values, BLUR_PX)
    return (blurred - blurred.mean()) / max(blurred.std(), 1e-9)


def _same_grey(a: np.ndarray, b: np.ndarray) -> bool:
    # Contrast is that of blurred pictures: detail that a copy lost must not count as contrast.
    blurred_a = _means(a, BLUR_PX)
    blurred_b = _means(b, BLUR_PX)
    gain = np.clip(blurred_a.std() / max(blurred_b.std(), 1e-9), *GAINS)
    fine_a = a - blurred_a
    fine_b = gain * (b - blurred_b)

    strong = [np.sqrt(_blocks(_means(fine, 2) ** 2)) for fine in (fine_a, fine_b)]
    more = np.maximum(*strong)
    if ((more >= STRONG_DETAIL) & (np.minimum(*strong) < MIN_DETAIL_SHARE * more)).any():
        return False

    detail = np.sqrt(np.maximum(_blocks(fine_a**2), _blocks(fine_b**2)))
    difference = np.sqrt(_blocks((a - a.mean() - gain * (b - b.mean())) ** 2))
    return bool((difference <= MAX_BLOCK_DIFFERENCE * (detail + NOISE)).all())


def _blocks(values: np.ndarray) -> np.ndarray:
    """Means over blocks of BLOCK_PX, which overlap: a scratch is whole in one of them."""
    return _means(values, BLOCK_PX)[::2, ::2]


def _means(values: np.ndarray, size: int) -> np.ndarray:
    """Means over size x size pixels around each; the border is repeated."""
    half = size // 2
    means = np.pad(values, (half, size - 1 - half), mode="edge")
    for axis in (0, 1):
        means = sliding_window_view(means, size, axis=axis).mean(axis=-1)
    return means
