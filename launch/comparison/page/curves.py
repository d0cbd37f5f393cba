"""Reduce a curve to few points that keep its extremes, and pack it for the page.

Method: equal buckets of points; of each its lowest and its highest value, as plotting libraries'
min-max decimation does, and its mean, from which the page smooths.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_POINTS = 2000
MIN_POINTS = 100
# Of all curves together, as base64, so that the page stays below 2 MB.
MAX_BYTES = 1_600_000
# Per point of a reduced curve: x and y, and half a mean, as float32 in base64.
BYTES_PER_POINT = (4 + 4 + 2) * 4 / 3

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Points in the order of their steps. The means are empty where all points are kept."""

    x: Floats
    y: Floats
    mean_x: Floats
    mean_y: Floats


def points_per_curve(lengths: Sequence[int]) -> int:
    """The most points a curve may have so that curves of these lengths fit into MAX_BYTES."""
    most = MAX_POINTS
    while most > MIN_POINTS:
        if sum(min(length, most) for length in lengths) * BYTES_PER_POINT <= MAX_BYTES:
            break
        most -= 50
    return most


def reduced(xs: Floats, ys: Floats, *, max_points: int) -> Curve:
    """The curve of finite values with at most `max_points` points: extremes, first and last."""
    none = np.empty(0)
    if len(xs) <= max_points:
        return Curve(x=xs, y=ys, mean_x=none, mean_y=none)
    # The first and the last point are kept besides those of the buckets.
    edges = np.linspace(0, len(xs), (max_points - 2) // 2 + 1).astype(int)
    kept = {0, len(xs) - 1}
    for start, stop in zip(edges[:-1], edges[1:], strict=True):
        kept |= {start + int(ys[start:stop].argmin()), start + int(ys[start:stop].argmax())}
    chosen = np.array(sorted(kept))
    counts = np.diff(edges)
    return Curve(
        x=xs[chosen],
        y=ys[chosen],
        mean_x=np.add.reduceat(xs, edges[:-1]) / counts,
        mean_y=np.add.reduceat(ys, edges[:-1]) / counts,
    )


class Packer:
    """Arrays as base64 of little-endian float32, equal ones once."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[str, int] = {}

    def add(self, values: Any) -> int:
        """The number of the array in `texts`."""
        limit = float(np.finfo(np.float32).max)
        narrow = np.clip(np.asarray(values, dtype=np.float64), -limit, limit).astype("<f4")
        text = base64.b64encode(narrow.tobytes()).decode()
        if text not in self._numbers:
            self._numbers[text] = len(self.texts)
            self.texts.append(text)
        return self._numbers[text]
