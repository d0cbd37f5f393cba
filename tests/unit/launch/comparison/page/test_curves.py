"""Reduced curves."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from launch.comparison.page.curves import (
    MAX_BYTES,
    MAX_POINTS,
    MIN_POINTS,
    Packer,
    points_per_curve,
    reduced,
)


@pytest.mark.parametrize("num", [MAX_POINTS + 1, 7 * MAX_POINTS + 3])
def test_a_reduced_curve_keeps_extremes_and_ends(num: int) -> None:
    steps = np.arange(num) * 10.0
    values = np.random.default_rng(0).normal(size=num)
    values[num // 3], values[num // 2] = 50.0, -40.0
    curve = reduced(steps, values, max_points=MAX_POINTS)
    assert MAX_POINTS / 2 < len(curve.x) <= MAX_POINTS
    assert (np.diff(curve.x) > 0).all()
    assert (curve.x[0], curve.x[-1]) == (steps[0], steps[-1])
    assert (curve.y[0], curve.y[-1]) == (values[0], values[-1])
    assert curve.y.max() == 50.0 and curve.x[curve.y.argmax()] == steps[num // 3]
    assert curve.y.min() == -40.0 and curve.x[curve.y.argmin()] == steps[num // 2]


def test_bucket_means_have_the_mean_of_all_points() -> None:
    """Extremes alone would draw the trend of one-sided spikes too high."""
    values = np.zeros(40 * MAX_POINTS)
    values[::40] = 1.0
    curve = reduced(np.arange(80_000.0), values, max_points=MAX_POINTS)
    assert curve.y.mean() > 0.4
    assert curve.mean_y.mean() == pytest.approx(1 / 40, rel=0.01)
    assert curve.mean_y.max() < 0.1  # of all points of a bucket, not of one
    assert curve.mean_x[0] < curve.mean_x[-1] <= len(values)


def test_short_curves_are_kept_whole() -> None:
    curve = reduced(np.array([1.0, 2, 3]), np.array([5.0, 4, 6]), max_points=MAX_POINTS)
    assert list(curve.x) == [1, 2, 3] and list(curve.y) == [5.0, 4.0, 6.0]
    assert not len(curve.mean_x)


def test_equal_arrays_are_packed_once() -> None:
    packer = Packer()
    assert [packer.add(values) for values in ([1, 2], [3.5], [1.0, 2.0])] == [0, 1, 0]
    unpacked = np.frombuffer(base64.b64decode(packer.texts[1]), "<f4")
    assert list(unpacked) == [3.5]


@pytest.mark.parametrize(("num_runs", "num_metrics"), [(10, 6), (10, 20), (40, 20)])
def test_long_curves_of_many_runs_fit_the_page(num_runs: int, num_metrics: int) -> None:
    lengths = [100_000] * num_runs * num_metrics
    most = points_per_curve(lengths)
    if num_runs * num_metrics == 60:
        assert most == MAX_POINTS
    assert most == MIN_POINTS or len(lengths) * most * 10 * 4 / 3 <= MAX_BYTES
    steps, values = np.arange(100_000.0), np.random.default_rng(0).normal(size=100_000)
    curve = reduced(steps, values, max_points=most)
    packed = 4 * (2 * len(curve.x) + len(curve.mean_y)) * 4 / 3
    assert len(lengths) * packed < 1.9e6
