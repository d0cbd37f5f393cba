"""Mixtures, views and subsets: still a pure function of the position."""

from __future__ import annotations

import hashlib
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitscale.data import order as order_module
from vitscale.data.order import (
    MIXTURE_BLOCK,
    ORDER_VERSION,
    VIEW_BLOCK,
    Draw,
    SampleOrder,
    TrainingOrder,
)


def part(num: int, name: str = "f") -> SampleOrder:
    lengths = (num // 2, num - num // 2)
    return SampleOrder(shard_lengths=lengths, fingerprint=name, seed=0)


def mixture(*shares: int, nums: tuple[int, ...], views: int = 1) -> TrainingOrder:
    parts = tuple(part(num, f"part {i}") for i, num in enumerate(nums))
    return TrainingOrder(parts=parts, shares=shares, views=views)


def test_one_set_in_one_view_is_its_own_order() -> None:
    single = part(50)
    order = TrainingOrder(parts=(single,), shares=(1_000_000,))
    for position in range(120):
        epoch, sample = single.at(position)
        assert order.at(position) == Draw(0, epoch, sample, 0)


def test_order_of_this_version_is_pinned() -> None:
    """An intended change must raise ORDER_VERSION, so that no run resumes in another order."""
    parts = tuple(
        SampleOrder(shard_lengths=tuple(range(3, 3 + num)), fingerprint=f"part {num}", seed=5)
        for num in (40, 20)
    )
    order = TrainingOrder(parts=parts, shares=(700_000, 300_000), views=2)
    draws = [order.at(position) for position in range(0, 4 * MIXTURE_BLOCK, 29)]
    text = repr([(draw.part, draw.epoch, draw.sample, draw.view) for draw in draws])
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert (ORDER_VERSION, digest[:16]) == (1, "b3d807c974a49307")


def test_each_set_keeps_its_own_order_and_share() -> None:
    order = mixture(700_000, 300_000, nums=(1000, 77))
    draws = [order.at(position) for position in range(3 * MIXTURE_BLOCK)]
    for number, share in enumerate((0.7, 0.3)):
        own = [(d.epoch, d.sample) for d in draws if d.part == number]
        assert abs(len(own) - share * len(draws)) < 2
        assert own == [order.parts[number].at(i) for i in range(len(own))]
    # Mixed, not one after the other: every stretch of 1,000 holds both in about their shares.
    for start in range(0, len(draws) - 1000, 1000):
        assert 230 < sum(d.part for d in draws[start : start + 1000]) < 370


@settings(deadline=None, max_examples=40)
@given(shares=st.lists(st.integers(1, 50), min_size=2, max_size=4), blocks=st.integers(1, 5))
def test_no_position_is_skipped_or_repeated_at_any_shares(shares: list[int], blocks: int) -> None:
    total = sum(shares)
    parts = [1_000_000 * share // total for share in shares]
    parts[0] += 1_000_000 - sum(parts)
    order = mixture(*parts, nums=tuple(100 for _ in parts))
    seen: list[list[int]] = [[] for _ in parts]
    for block in range(blocks):
        of, places = order_module._mixture_block(order, block)
        for number in range(len(parts)):
            seen[number] += places[of == number].tolist()
    assert all(places == list(range(len(places))) for places in seen)
    assert sum(map(len, seen)) == blocks * MIXTURE_BLOCK


@pytest.mark.parametrize("views", [2, 3])
def test_every_sample_comes_once_in_each_view(views: int) -> None:
    num = 5 * VIEW_BLOCK
    order = TrainingOrder(parts=(part(num),), shares=(1_000_000,), views=views)
    draws = [order.at(position) for position in range(views * num)]
    assert Counter((d.sample, d.view) for d in draws) == {
        (sample, view): 1 for sample in range(num) for view in range(views)
    }
    # A sample's views fall into one stretch: a global batch that is a multiple holds them together.
    for start in range(0, views * num, views * VIEW_BLOCK):
        stretch = [d.sample for d in draws[start : start + views * VIEW_BLOCK]]
        assert len(set(stretch)) == VIEW_BLOCK
    # ... and neighbours are different samples, which mixing relies on.
    assert all(a.sample != b.sample for a, b in zip(draws[::2], draws[1::2], strict=True))


def test_far_positions_are_found_without_the_ones_before() -> None:
    order = mixture(500_000, 500_000, nums=(1_000_000, 3))
    draw = order.at(10**12)
    assert draw == order.at(10**12)
    assert draw.epoch == order.parts[draw.part].at(10**12 // 2)[0] or draw.epoch > 0


def test_mixture_is_pinned_for_all_time() -> None:
    order = mixture(600_000, 400_000, nums=(9, 4), views=2)
    found = [(d.part, d.sample, d.view) for d in map(order.at, range(6))]
    assert found == PINNED
    assert [order.at(VIEW_BLOCK + i).view for i in range(3)] == [1, 1, 1]
    np.testing.assert_array_equal(
        [order.at(VIEW_BLOCK + i).sample for i in range(6)], [sample for _, sample, _ in found]
    )


PINNED = [(0, 4, 0), (0, 3, 0), (1, 3, 0), (0, 6, 0), (1, 1, 0), (0, 2, 0)]
