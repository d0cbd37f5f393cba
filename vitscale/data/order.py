"""The order of samples: a pure function of (index fingerprint, seed, epoch).

Owns: which sample stands at which position of training, and who reads it.
Leaves out: reading. There is no shuffle buffer and no state: a position is one integer.

The permutation is shard-blocked: shards are permuted, runs of `BLOCK_SHARDS` of them form a block,
and samples are permuted inside a block. Reads stay within a few open files, and only the block at
hand has to be computed, so a jump to any position costs the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

BLOCK_SHARDS = 16
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def stream_key(*parts: object) -> int:
    """A 64-bit key from any printable parts; equal parts give equal keys on every machine."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little")


def mix(value: int) -> int:
    """SplitMix64's output function: 64 bits in, 64 well-mixed bits out. Steele et al. 2014."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


class CounterRandom:
    """Uniform numbers as a function of (key, draw number): SplitMix64 from a given start."""

    def __init__(self, key: int) -> None:
        self._state = key

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        """The next number in [low, high)."""
        self._state = (self._state + _GOLDEN) & _MASK
        return low + (high - low) * (mix(self._state) >> 11) * 2.0**-53


def permutation(num: int, *, key: int) -> np.ndarray:
    """A permutation of range(num), int64 [num], from `key` alone.

    Sorted SplitMix64 hashes rather than numpy's shuffle, whose stream may change between versions.
    """
    with np.errstate(over="ignore"):
        x = np.uint64(key) + np.arange(1, num + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return np.argsort(x, kind="stable")


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """The endless sequence of samples of one split."""

    shard_lengths: tuple[int, ...]
    fingerprint: str
    seed: int

    @property
    def num_samples(self) -> int:
        return sum(self.shard_lengths)

    def at(self, position: int) -> tuple[int, int]:
        """(epoch, sample) at a position counted from the start of training. O(block)."""
        epoch, offset = divmod(position, _total(self.shard_lengths))
        shards, starts = _blocks(self, epoch)
        block = int(np.searchsorted(starts, offset, side="right")) - 1
        return epoch, int(_block_samples(self, epoch, block)[offset - starts[block]])


@lru_cache(maxsize=8)
def _total(shard_lengths: tuple[int, ...]) -> int:
    return sum(shard_lengths)


@lru_cache(maxsize=8)
def _blocks(order: SampleOrder, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """Permuted shard numbers, and the offset in the epoch at which each block starts."""
    key = stream_key("shards", order.fingerprint, order.seed, epoch)
    shards = permutation(len(order.shard_lengths), key=key)
    lengths = np.array(order.shard_lengths, dtype=np.int64)[shards]
    ends = np.cumsum(lengths)
    starts = np.concatenate([[0], ends])[:-1][::BLOCK_SHARDS]
    return shards, starts


@lru_cache(maxsize=8)
def _block_samples(order: SampleOrder, epoch: int, block: int) -> np.ndarray:
    """Samples of one block, in order."""
    shards, _ = _blocks(order, epoch)
    chosen = shards[block * BLOCK_SHARDS : (block + 1) * BLOCK_SHARDS]
    first = np.concatenate([[0], np.cumsum(order.shard_lengths)])
    samples = np.concatenate([np.arange(first[shard], first[shard + 1]) for shard in chosen])
    key = stream_key("samples", order.fingerprint, order.seed, epoch, block)
    return samples[permutation(len(samples), key=key)]


def rank_batches(
    *,
    start: int,
    stop: int,
    rank: int,
    world_size: int,
    micro_batch: int,
) -> Iterator[list[int]]:
    """Positions of this rank's micro-batches between two positions of training.

    Each run of world_size * micro_batch positions is one forward pass of all ranks; `start` and
    `stop` are multiples of the global batch.
    """
    stride = world_size * micro_batch
    assert (stop - start) % stride == 0
    for base in range(start, stop, stride):
        first = base + rank * micro_batch
        yield list(range(first, first + micro_batch))
