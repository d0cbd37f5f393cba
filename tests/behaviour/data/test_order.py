"""The order of samples, mixtures and views: exact coverage, purity, any layout."""

import hashlib
from collections import Counter
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tables import every, refused, rows
from vitscale.data import order as order_module
from vitscale.data.order import (
    BLOCK_SHARDS,
    MIXTURE_BLOCK,
    ORDER_VERSION,
    REMEMBERED,
    REPEAT_BLOCK,
    SampleOrder,
    TrainingOrder,
    check_mixed,
)
from vitscale.data.samples import augmentation_key
from vitscale.distributed.random_numbers import (
    mix,
    permutation,
    stream_key,
)
from vitscale.objectives.draws import uniform_rows

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=40).filter(
    lambda x: sum(x) > 0
)


def order(lengths: list[int], *, seed: int = 0, fingerprint: str = "f") -> SampleOrder:
    return SampleOrder(shard_lengths=tuple(lengths), fingerprint=fingerprint, seed=seed)


@given(lengths=LENGTHS, seed=st.integers(0, 2**40), epoch=st.integers(0, 3))
def test_every_epoch_holds_every_sample_once(lengths, seed, epoch):
    sample_order = order(lengths, seed=seed)
    num = sum(lengths)
    found = [sample_order.at(epoch * num + offset)[1] for offset in range(num)]
    assert sorted(found) == list(range(num))


def test_order_is_pinned_for_all_time():
    """A changed order would silently break the resume of every run in the world.

    An intended change must raise ORDER_VERSION, so that no run resumes in another order.
    """
    assert permutation(8, key=42).tolist() == [4, 1, 6, 2, 3, 0, 7, 5]
    found = [order([3, 2, 4], seed=7).at(p)[1] for p in range(9)]
    assert found == [1, 6, 0, 7, 2, 5, 3, 4, 8]
    assert stream_key("a", 1) == 5635535206041787705
    parts = tuple(
        SampleOrder(
            shard_lengths=tuple(range(3, 3 + num)), fingerprint=f"part {num}", seed=5
        )
        for num in (40, 20)
    )
    mixed = TrainingOrder(parts=parts, shares=(700_000, 300_000), views=2)
    draws = [mixed.at(position) for position in range(0, 4 * MIXTURE_BLOCK, 29)]
    text = repr([(draw.part, draw.epoch, draw.sample, draw.repeat) for draw in draws])
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert ORDER_VERSION == 1
    assert digest[:16] == "b3d807c974a49307"


def test_each_order_remembers_its_own_blocks(monkeypatch):
    """A mixture alternates between many orders; none may evict the cached blocks of another."""
    computed = []

    def noted(num, *, key):
        computed.append(key)
        return permutation(num, key=key)

    monkeypatch.setattr(order_module, "permutation", noted)
    orders = [order([3] * 40, fingerprint=str(i)) for i in range(20)]
    for offset in range(40):
        for each in orders:
            each.at(offset)

    # Of shards, and of the first block's samples.
    assert len(computed) == 2 * len(orders)
    for position in range(0, 10_000, 40):
        orders[0].at(position)
    assert len(orders[0]._recent_epochs) == len(orders[0]._recent_blocks) == REMEMBERED


def test_the_shards_of_this_block_and_the_next_are_wanted_ahead():
    sample_order = order([1] * (3 * BLOCK_SHARDS + 4))
    num = sample_order.num_samples

    # A sample is a shard here.
    this_epoch = [sample_order.at(offset)[1] for offset in range(num)]
    next_epoch = [sample_order.at(num + offset)[1] for offset in range(num)]
    for start in range(0, num, BLOCK_SHARDS):
        block = this_epoch[start : start + BLOCK_SHARDS]
        after = (this_epoch[start + BLOCK_SHARDS :] or next_epoch)[:BLOCK_SHARDS]
        ahead = sample_order.shards_ahead(epoch=0, shard=block[0])
        assert sorted(ahead[: len(block)]) == sorted(block)
        assert set(ahead) == {*block, *after}


@rows("""
- [num_classes, num_tars, is_refused]
- [1000, 1000, true]
- [1000, 40, false]
- [20, 200, false]
""")
def test_tars_sorted_by_class_are_refused(num_classes, num_tars, is_refused):
    labels = np.repeat(np.arange(num_classes, dtype=np.int32), 40)
    lengths = [len(part) for part in np.array_split(labels, num_tars)]
    check_mixed(
        np.random.default_rng(1).permutation(labels), shard_lengths=lengths, where="x"
    )
    check_mixed(np.full_like(labels, -1), shard_lengths=lengths, where="x")
    too_few = refused(r"16 classes; shuffled they would have 4\d\d")
    with too_few if is_refused else nullcontext():
        check_mixed(labels, shard_lengths=lengths, where="x")


# ---- mixtures and views -------------------------------------------------------------------------


def mixture(*shares: int, nums: tuple[int, ...], repeats: int = 1) -> TrainingOrder:
    parts = tuple(
        order([num // 2, num - num // 2], fingerprint=f"part {i}")
        for i, num in enumerate(nums)
    )
    return TrainingOrder(parts=parts, shares=shares, repeats=repeats)


@pytest.mark.parametrize(
    ("shares", "nums"),
    [((700_000, 300_000), (1000, 77)), ((333_334, 333_333, 333_333), (7, 1000, 50))],
)
def test_each_set_keeps_its_own_order_and_share(shares, nums):
    order = mixture(*shares, nums=nums)
    draws = [order.at(position) for position in range(3 * MIXTURE_BLOCK)]
    for number, share in enumerate(shares):
        own = [(d.epoch, d.sample) for d in draws if d.part == number]
        assert len(set(own)) == len(own)
        assert abs(len(own) - share * len(draws) / 1_000_000) < 2
        assert own == [order.parts[number].at(i) for i in range(len(own))]

        # Mixed, not one after the other: every stretch holds about its share.
        for start in range(0, len(draws) - 1000, 1000):
            found = sum(d.part == number for d in draws[start : start + 1000])
            assert abs(found - share / 1000) < 75


@every(views="2, 3")
def test_every_sample_comes_once_in_each_view(views):
    num = 5 * REPEAT_BLOCK
    order_of_views = mixture(1_000_000, nums=(num,), repeats=views)
    draws = [order_of_views.at(position) for position in range(views * num)]
    assert Counter((d.sample, d.repeat) for d in draws) == {
        (sample, view): 1 for sample in range(num) for view in range(views)
    }
    more = [
        order_of_views.at(position) for position in range(views * num, 2 * views * num)
    ]
    assert len({augmentation_key(0, draw) for draw in draws + more}) == 2 * views * num

    # A sample's views fall into one stretch: a global batch that is a multiple holds them together.
    for start in range(0, views * num, views * REPEAT_BLOCK):
        stretch = [d.sample for d in draws[start : start + views * REPEAT_BLOCK]]
        assert len(set(stretch)) == REPEAT_BLOCK

    # ... and neighbours are different samples, which mixing relies on.
    assert all(
        a.sample != b.sample for a, b in zip(draws[::2], draws[1::2], strict=True)
    )


# ---- random numbers by key and position ----------------------------------------------------------

GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1


def test_rows_equal_the_formula_on_python_integers():
    positions = np.array([5, 0, 10**12])
    found = uniform_rows(positions, num=3, key=MASK - 7)
    for row, position in zip(found, positions.tolist(), strict=True):
        start = mix((MASK - 7 + (position + 1) * GOLDEN) & MASK)
        wanted = [
            (mix((start + n * GOLDEN) & MASK) >> 11) * 2.0**-53 for n in (1, 2, 3)
        ]
        assert row.tolist() == wanted
