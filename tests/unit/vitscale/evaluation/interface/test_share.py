"""The interval of a share is SciPy's."""

from __future__ import annotations

import math

import pytest
from scipy.stats import binomtest

from vitscale.evaluation.interface.evaluation import Share


@pytest.mark.parametrize(
    ("count", "images"), [(0, 1), (1, 1), (0, 360), (346, 360), (360, 360), (42_500, 50_000)]
)
def test_the_interval_equals_scipys(count: int, images: int) -> None:
    expected = binomtest(count, images).proportion_ci(method="wilson")
    found = Share(count, images).interval()
    assert found == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_a_share_is_a_number_that_knows_its_images() -> None:
    share = Share(3, 4)
    assert share == 0.75 and share.images == 4 and math.isnan(Share(0, 0))
    assert all(map(math.isnan, Share(0, 0).interval()))
