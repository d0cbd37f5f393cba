"""Points of a chart."""

from __future__ import annotations

from launch.comparison.report import MAX_POINTS, _thin


def test_thinned_points_hold_the_first_and_the_last() -> None:
    num = 3 * MAX_POINTS
    steps, values = _thin(list(range(num)), [step / 2 for step in range(num)])
    assert len(steps) == MAX_POINTS == len(set(steps))
    assert (steps[0], steps[-1], values[-1]) == (0, num - 1, (num - 1) / 2)
