"""Random numbers as functions of a key and a position."""

from __future__ import annotations

import numpy as np

from vitscale.distributed.random_numbers import mix, uniform_rows

GOLDEN, MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


def test_rows_equal_the_formula_on_python_integers() -> None:
    positions = np.array([5, 0, 10**12])
    found = uniform_rows(positions, num=3, key=MASK - 7)
    for row, position in zip(found, positions.tolist(), strict=True):
        start = mix((MASK - 7 + (position + 1) * GOLDEN) & MASK)
        wanted = [(mix((start + n * GOLDEN) & MASK) >> 11) * 2.0**-53 for n in (1, 2, 3)]
        assert row.tolist() == wanted


def test_rows_are_uniform_and_independent() -> None:
    rows = uniform_rows(np.arange(2000), num=50, key=3)
    assert abs(rows.mean() - 0.5) < 5 * 12**-0.5 / 100_000**0.5
    assert np.histogram(rows, bins=10)[0].std() < 3 * (100_000 * 0.09) ** 0.5
    neighbours = np.corrcoef(rows[:-1].ravel(), rows[1:].ravel())[0, 1]
    assert abs(neighbours) < 5 / 98_000**0.5
