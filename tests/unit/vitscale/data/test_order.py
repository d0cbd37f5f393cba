"""The order of samples, against its contract: exact coverage, purity, any layout."""

from __future__ import annotations

import pickle
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitscale.config.errors import UserError
from vitscale.data import order as order_module
from vitscale.data.order import BLOCK_SHARDS, REMEMBERED, SampleOrder, check_mixed, rank_batches
from vitscale.distributed.random_numbers import CounterRandom, permutation, stream_key

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=40).filter(lambda x: sum(x) > 0)


def order(lengths: list[int], *, seed: int = 0, fingerprint: str = "f") -> SampleOrder:
    return SampleOrder(shard_lengths=tuple(lengths), fingerprint=fingerprint, seed=seed)


def epoch_samples(sample_order: SampleOrder, epoch: int) -> list[int]:
    num = sample_order.num_samples
    return [sample_order.at(epoch * num + offset)[1] for offset in range(num)]


@given(lengths=LENGTHS, seed=st.integers(0, 2**40), epoch=st.integers(0, 3))
def test_every_epoch_holds_every_sample_once(lengths: list[int], seed: int, epoch: int) -> None:
    sample_order = order(lengths, seed=seed)
    assert sorted(epoch_samples(sample_order, epoch)) == list(range(sum(lengths)))


def test_order_changes_with_seed_epoch_and_data() -> None:
    lengths = [20] * 5
    orders = [
        epoch_samples(order(lengths), 0),
        epoch_samples(order(lengths), 1),
        epoch_samples(order(lengths, seed=1), 0),
        epoch_samples(order(lengths, fingerprint="g"), 0),
    ]
    assert len({tuple(each) for each in orders}) == 4
    assert all(each != sorted(each) for each in orders)


def test_order_is_pinned_for_all_time() -> None:
    # A changed order would silently break the resume of every run in the world.
    assert permutation(8, key=42).tolist() == PINNED_PERMUTATION
    assert [order([3, 2, 4], seed=7).at(p)[1] for p in range(9)] == PINNED_ORDER
    assert stream_key("a", 1) == PINNED_KEY


def test_each_order_remembers_its_own_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixture alternates between many orders; none may evict the cached blocks of another."""
    computed = []

    def noted(num: int, *, key: int) -> np.ndarray:
        computed.append(key)
        return permutation(num, key=key)

    monkeypatch.setattr(order_module, "permutation", noted)
    orders = [order([3] * 40, fingerprint=str(i)) for i in range(20)]
    for offset in range(40):
        for each in orders:
            each.at(offset)
    assert len(computed) == 2 * len(orders)  # of shards, and of the first block's samples
    for position in range(0, 10_000, 40):
        orders[0].at(position)
    assert len(orders[0]._recent_epochs) == len(orders[0]._recent_blocks) == REMEMBERED


def test_an_order_is_the_same_in_a_worker_that_gets_it_pickled() -> None:
    sample_order = order([3, 2, 4] * 20)
    before = epoch_samples(sample_order, 1)
    assert epoch_samples(pickle.loads(pickle.dumps(sample_order)), 1) == before


def test_the_shards_of_this_block_and_the_next_are_wanted_ahead() -> None:
    sample_order = order([1] * (3 * BLOCK_SHARDS + 4))
    num = sample_order.num_samples
    this_epoch = [sample_order.at(offset)[1] for offset in range(num)]  # a sample is a shard here
    next_epoch = [sample_order.at(num + offset)[1] for offset in range(num)]
    for start in range(0, num, BLOCK_SHARDS):
        block = this_epoch[start : start + BLOCK_SHARDS]
        after = (this_epoch[start + BLOCK_SHARDS :] or next_epoch)[:BLOCK_SHARDS]
        ahead = sample_order.shards_ahead(epoch=0, shard=block[0])
        assert sorted(ahead[: len(block)]) == sorted(block)
        assert set(ahead) == {*block, *after}


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("micro_batch", [2, 4])
def test_global_batches_are_equal_on_every_layout(world_size: int, micro_batch: int) -> None:
    global_batch = 16
    per_rank = [
        [
            position
            for batch in rank_batches(
                start=32, stop=80, rank=rank, world_size=world_size, micro_batch=micro_batch
            )
            for position in batch
        ]
        for rank in range(world_size)
    ]
    share = global_batch // world_size
    for step in range(3):
        seen = sorted(p for own in per_rank for p in own[step * share : (step + 1) * share])
        first = 32 + step * global_batch
        assert seen == list(range(first, first + global_batch))


def test_counter_random_is_uniform_and_repeatable() -> None:
    draws = np.array([CounterRandom(key).uniform() for key in range(20_000)])
    assert 0 <= draws.min() and draws.max() < 1
    assert abs(draws.mean() - 0.5) < 0.01 and abs(draws.var() - 1 / 12) < 0.005
    first, second = CounterRandom(5), CounterRandom(5)
    assert [first.uniform(2, 3) for _ in range(5)] == [second.uniform(2, 3) for _ in range(5)]


PINNED_PERMUTATION = [4, 1, 6, 2, 3, 0, 7, 5]
PINNED_ORDER = [1, 6, 0, 7, 2, 5, 3, 4, 8]
PINNED_KEY = 5635535206041787705


@pytest.mark.parametrize(
    "num_classes, num_tars, is_refused", [(1000, 1000, True), (1000, 40, False), (20, 200, False)]
)
def test_tars_sorted_by_class_are_refused(
    num_classes: int, num_tars: int, is_refused: bool
) -> None:
    labels = np.repeat(np.arange(num_classes, dtype=np.int32), 40)
    lengths = [len(part) for part in np.array_split(labels, num_tars)]
    check_mixed(np.random.default_rng(1).permutation(labels), shard_lengths=lengths, where="x")
    check_mixed(np.full_like(labels, -1), shard_lengths=lengths, where="x")
    refused = pytest.raises(UserError, match=r"16 classes; shuffled they would have 4\d\d")
    with refused if is_refused else nullcontext():
        check_mixed(labels, shard_lengths=lengths, where="x")
