"""Compare two pictures that look alike at 32 x 32 pixels at 128 x 128: are they really copies?

Owns: the picture that is compared, and the test of a pair.
Leaves out: which pairs look alike (`similar`), and reading images (`reading`).

A scratch on a uniform surface, or the sign in an icon, is not among the 64 frequencies of a
descriptor. Copies differ everywhere by what encoding and resizing explain; other pictures differ by
more than that somewhere. Brightness and contrast are divided out. Thresholds: docs/duplicates.md;
measured by benchmarks/near_duplicates.py.
"""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from PIL import Image

from vitscale.images.plain import grey_picture

SIDE_PX = 128
# Smaller pictures are compared at the size of the smaller one.
MIN_SIDE_PX = 32
BLOCK_PX = 8
BLUR_PX = 5
# Largest difference of a block, as a share of its own detail plus NOISE grey values. Of 1,168
# copies of smooth surfaces one had 1.21, all others less than 0.91 (November 2026).
MAX_BLOCK_DIFFERENCE = 1.3
NOISE = 2.5
# A block with at least STRONG_DETAIL grey values of detail has this share of it in a copy too.
# Details finer than 2 x 2 pixels do not count: resizing removes them.
STRONG_DETAIL = 5.0
MIN_DETAIL_SHARE = 0.4
GAINS = (0.5, 2.0)


def likeness(left: bytes, right: bytes) -> float:
    """Return the correlation of two copies of a picture, directly or mirrored left-right.

    left, right: encoded images. 0 if they are no copies, or one cannot be decoded.
    """
    one = grey_picture(left, side=SIDE_PX)
    other = grey_picture(right, side=SIDE_PX)
    if one is None or other is None:
        return 0.0
    # The smaller picture has no finer detail that could be compared.
    side = max(MIN_SIDE_PX, min(SIDE_PX, one.short_side, other.short_side))
    a = _reduced(one.pixels, side)
    b = _reduced(other.pixels, side)
    # Both have the same brightness and contrast, so the smaller difference is of the right one.
    b = min((b, b[:, ::-1]), key=lambda turned: np.square(a - turned).sum())
    if not _same_grey(a, b):
        return 0.0
    return float(np.corrcoef(a.ravel(), b.ravel())[0, 1])


def _reduced(pixels: np.ndarray, side: int) -> np.ndarray:
    """A picture, float64 [side, side]."""
    small = Image.fromarray(pixels).resize((side, side), Image.Resampling.BILINEAR)
    return np.asarray(small, dtype=np.float64)


def _same_grey(a: np.ndarray, b: np.ndarray) -> bool:
    # Contrast is that of blurred pictures: detail that a copy lost must not count as contrast.
    blurred_a = _means(a, BLUR_PX)
    blurred_b = _means(b, BLUR_PX)
    # Nearly uniform pictures have hardly any contrast; dividing by it would amplify noise.
    gain = np.clip(blurred_a.std() / max(blurred_b.std(), 1e-9), *GAINS)
    fine_a = a - blurred_a
    fine_b = gain * (b - blurred_b)

    strong = [np.sqrt(_blocks(_means(fine, 2) ** 2)) for fine in (fine_a, fine_b)]
    more = np.maximum(*strong)
    if (
        (more >= STRONG_DETAIL) & (np.minimum(*strong) < MIN_DETAIL_SHARE * more)
    ).any():
        return False

    detail = np.sqrt(np.maximum(_blocks(fine_a**2), _blocks(fine_b**2)))
    difference = np.sqrt(_blocks((a - a.mean() - gain * (b - b.mean())) ** 2))
    return bool((difference <= MAX_BLOCK_DIFFERENCE * (detail + NOISE)).all())


def _blocks(values: np.ndarray) -> np.ndarray:
    """Means over blocks of BLOCK_PX, which overlap: a scratch is whole in one of them."""
    return _window_means(values, BLOCK_PX)[::2, ::2]


def _means(values: np.ndarray, size: int) -> np.ndarray:
    """Means over size x size pixels around each; the border is repeated."""
    half = size // 2
    return _window_means(np.pad(values, (half, size - 1 - half), mode="edge"), size)


def _window_means(values: np.ndarray, size: int) -> np.ndarray:
    """Means over all size x size pixels of [N, N] values: N - size + 1 a side."""
    for axis in (0, 1):
        values = sliding_window_view(values, size, axis=axis).mean(axis=-1)
    return values
