"""The order of samples, mixtures and views: exact coverage, purity, any layout."""

import hashlib
from collections import Counter
from contextlib import nullcontext
from itertools import product
from types import SimpleNamespace

import numpy as np
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

# Also empty shards, and more shards than a block has.
LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=40).filter(any)


def order(
    lengths: list[int],
    *,
    seed: int = 0,
    fingerprint: str = "f",
) -> SampleOrder:
    split = SimpleNamespace(ends=np.cumsum(lengths), fingerprint=fingerprint)
    return SampleOrder(split=split, seed=seed)


@given(
    lengths=LENGTHS,
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 3),
)
def test_every_epoch_holds_every_sample_once(lengths, seed, epoch):
    sample_order = order(lengths, seed=seed)
    num = sum(lengths)
    first = epoch * num
    drawn = [sample_order.at(first + offset)[1] for offset in range(num)]
    assert sorted(drawn) == list(range(num))


def test_order_is_pinned_for_all_time():
    """A changed order would silently break the resume of every run in the world.

    An intended change must raise ORDER_VERSION, so that no run resumes in another order.
    """
    assert ORDER_VERSION == 1
    assert stream_key("a", 1) == 5635535206041787705
    assert permutation(8, key=42).tolist() == [4, 1, 6, 2, 3, 0, 7, 5]

    # One block of three shards, small enough to be read here.
    small = order([3, 2, 4], seed=7)
    drawn = [small.at(position)[1] for position in range(9)]
    assert drawn == [1, 6, 0, 7, 2, 5, 3, 4, 8]

    # Several blocks, two sets and two views: too many to list, so their hash.
    parts = []
    for num in (40, 20):
        lengths = [*range(3, 3 + num)]
        parts.append(order(lengths, fingerprint=f"part {num}", seed=5))
    mixed = TrainingOrder(
        parts=tuple(parts),
        shares=(700_000, 300_000),
        repeats=2,
    )

    # A stride without a factor in common with the blocks meets any place of them.
    draws = []
    for position in range(0, 4 * MIXTURE_BLOCK, 29):
        draw = mixed.at(position)
        draws.append((draw.part, draw.epoch, draw.sample, draw.repeat))
    text = repr(draws)
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert digest[:16] == "b3d807c974a49307"


def test_each_order_remembers_its_own_blocks(monkeypatch):
    """A mixture alternates between many orders; none may evict the cached blocks of another."""
    computed = []

    def noted(num, *, key):
        computed.append(key)
        return permutation(num, key=key)

    monkeypatch.setattr(order_module, "permutation", noted)
    orders = [order([3] * 40, fingerprint=str(number)) for number in range(20)]
    for offset in range(40):
        for sample_order in orders:
            sample_order.at(offset)

    # One of the shards and one of the first block's samples: nothing was computed twice.
    assert len(computed) == 2 * len(orders)

    # A long run must not keep every epoch that it has passed.
    first = orders[0]
    for position in range(0, 10_000, 40):
        first.at(position)
    assert len(first._recent_epochs) == len(first._recent_blocks) == REMEMBERED


def test_the_shards_of_this_block_and_the_next_are_wanted_ahead():
    # One sample a shard, so a sample's number is its shard's; the last block has four.
    sample_order = order([1] * (3 * BLOCK_SHARDS + 4))
    num = sample_order.num_samples
    epochs = []
    for epoch in range(2):
        first = epoch * num
        epochs.append([sample_order.at(first + offset)[1] for offset in range(num)])
    this_epoch, next_epoch = epochs

    for start in range(0, num, BLOCK_SHARDS):
        end = start + BLOCK_SHARDS
        block = this_epoch[start:end]

        # Behind the last block comes the first one of the next epoch.
        after = this_epoch[end:] or next_epoch
        ahead = sample_order.shards_ahead(epoch=0, shard=block[0])
        assert sorted(ahead[: len(block)]) == sorted(block)
        assert set(ahead) == {*block, *after[:BLOCK_SHARDS]}


# A class a tar; tars of many classes; and few classes, of which a block has most anyway.
@rows("""
- [num_classes, num_tars, is_refused]
- [1000, 1000, true]
- [1000, 40, false]
- [20, 200, false]
""")
def test_tars_sorted_by_class_are_refused(num_classes, num_tars, is_refused):
    # 40 samples of each class, one class after the other.
    labels = np.repeat(np.arange(num_classes, dtype=np.int32), 40)
    lengths = [len(part) for part in np.array_split(labels, num_tars)]

    # Shuffled samples and samples without labels give no reason to refuse.
    shuffled = np.random.default_rng(1).permutation(labels)
    unlabelled = np.full_like(labels, -1)
    for mixed in (shuffled, unlabelled):
        check_mixed(mixed, shard_lengths=lengths, where="x")

    # A block of 16 tars has 16 classes; the expected number is about 1000 * (1 - (1 - 0.001)**640).
    too_few = refused(r"16 classes; shuffled they would have 4\d\d")
    with too_few if is_refused else nullcontext():
        check_mixed(labels, shard_lengths=lengths, where="x")


# ---- mixtures and views -------------------------------------------------------------------------


def mixture(*shares: int, nums: tuple[int, ...], repeats: int = 1) -> TrainingOrder:
    """Sets with so many samples, each in two shards."""
    parts = []
    for number, num in enumerate(nums):
        half = num // 2
        parts.append(order([half, num - half], fingerprint=f"part {number}"))
    return TrainingOrder(
        parts=tuple(parts),
        shares=shares,
        repeats=repeats,
    )


# Small sets are passed many times; thirds do not divide the block.
@rows("""
- [shares, nums]
- [[700000, 300000], [1000, 77]]
- [[333334, 333333, 333333], [7, 1000, 50]]
""")
def test_each_set_keeps_its_own_order_and_share(shares, nums):
    order = mixture(*shares, nums=nums)
    draws = [order.at(position) for position in range(3 * MIXTURE_BLOCK)]
    num = len(draws)
    for number, share in enumerate(shares):
        drawn = [(draw.epoch, draw.sample) for draw in draws if draw.part == number]
        assert len(set(drawn)) == len(drawn)

        # Rounding in each block may not add up over the blocks.
        assert abs(len(drawn) - share * num / 1_000_000) < 2
        own_order = order.parts[number]
        assert drawn == [own_order.at(position) for position in range(len(drawn))]

        # Mixed, not one after the other: every stretch holds about its share. The standard
        # deviation is below sqrt(1000) / 2 = 16.
        for start in range(0, num - 1000, 1000):
            stretch = draws[start : start + 1000]
            count = sum(draw.part == number for draw in stretch)
            assert abs(count - share / 1000) < 75


@every(views="2, 3")
def test_every_sample_comes_once_in_each_view(views):
    num = 5 * REPEAT_BLOCK
    total = views * num
    order_of_views = mixture(1_000_000, nums=(num,), repeats=views)
    draws = [order_of_views.at(position) for position in range(2 * total)]
    first = draws[:total]
    counts = Counter((draw.sample, draw.repeat) for draw in first)
    assert counts == dict.fromkeys(product(range(num), range(views)), 1)

    # Each view is augmented in its own way, also in the second pass.
    assert len({augmentation_key(0, draw) for draw in draws}) == 2 * total

    # A sample's views fall into one stretch: a global batch that is a multiple holds them together.
    stretch = views * REPEAT_BLOCK
    samples = [draw.sample for draw in first]
    for start in range(0, total, stretch):
        assert len(set(samples[start : start + stretch])) == REPEAT_BLOCK

    # ... and neighbours are different samples, which mixing relies on.
    for sample, neighbour in zip(samples[::2], samples[1::2], strict=True):
        assert sample != neighbour


# ---- random numbers by key and position ----------------------------------------------------------

# The increment of SplitMix64 (Steele et al. 2014): 2^64 divided by the golden ratio.
GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1


def test_rows_equal_the_formula_on_python_integers():
    # Below, at and far above what 32 bits hold; the key makes the sum overflow 64 bits.
    positions = np.array([5, 0, 10**12])
    key = MASK - 7
    rows = uniform_rows(positions, num=3, key=key)
    for row, position in zip(rows, positions.tolist(), strict=True):
        start = mix((key + (position + 1) * GOLDEN) & MASK)
        expected = []
        for number in (1, 2, 3):
            word = mix((start + number * GOLDEN) & MASK)

            # The upper 53 bits: as many as a double has.
            expected.append((word >> 11) * 2.0**-53)
        assert row.tolist() == expected
