"""Map positions of training to samples: a pure function of (index fingerprint, seed, epoch).

There is no shuffle buffer and no state: a position is one integer.

The permutation is shard-blocked: shards are permuted, `BLOCK_SHARDS` consecutive ones form a block,
and samples are permuted inside a block. So reads touch few files at a time, only the current block
is computed, and seeking to any position costs the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from vitscale.config.errors import UserError
from vitscale.distributed.random_numbers import permutation, stream_key

# Increase it with any change of the order. A checkpoint of another version is refused, because
# the run would resume in another order.
ORDER_VERSION = 1
# Shards that are mixed at a time. More mix better; fewer need less space in a cache.
BLOCK_SHARDS = 16
MIXTURE_BLOCK = 1 << 14
# Shards that show whether all are mixed: 64 blocks.
MIXED_SHARDS = 1024
# Positions that show different samples once each before their repeats come.
REPEAT_BLOCK = 64
MILLION = 1_000_000
REMEMBERED = 3


class Ordered(Protocol):
    """What the order needs of a split."""

    @property
    def fingerprint(self) -> str: ...
    @property
    def ends(self) -> np.ndarray:
        """int64 [shards]: samples up to the end of each shard."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleOrder:
    """The infinite sequence of samples of one split."""

    split: Ordered
    seed: int
    # Caches per order: a mixture of many sets would thrash a shared one.
    _recent_epochs: dict[int, tuple[np.ndarray, np.ndarray]] = field(
        default_factory=dict
    )
    _recent_blocks: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)

    @property
    def num_samples(self) -> int:
        return int(self.split.ends[-1])

    def samples_of(self, shard: int) -> range:
        """The samples of a shard."""
        ends = self.split.ends
        return range(int(ends[shard - 1]) if shard else 0, int(ends[shard]))

    def at(self, position: int) -> tuple[int, int]:
        """(epoch, sample) at a position counted from the start of training. O(block)."""
        epoch, offset = divmod(position, self.num_samples)
        shards, starts = self._blocks(epoch)
        block = int(np.searchsorted(starts, offset, side="right")) - 1
        return epoch, int(self._block_samples(epoch, block)[offset - starts[block]])

    def shards_ahead(self, *, epoch: int, shard: int) -> list[int]:
        """Shards of the block that holds `shard`, then those of the next block."""
        shards, starts = self._blocks(epoch)
        block = int(np.flatnonzero(shards == shard)[0]) // BLOCK_SHARDS
        ahead = shards[block * BLOCK_SHARDS : (block + 2) * BLOCK_SHARDS].tolist()
        # The last block of an epoch is followed by the first one of the next epoch.
        if block + 1 == len(starts):
            ahead += self._blocks(epoch + 1)[0][:BLOCK_SHARDS].tolist()
        return list(dict.fromkeys(ahead))

    def _blocks(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Permuted shard numbers, and the offset of each block in the epoch."""
        if epoch not in self._recent_epochs:
            ends = self.split.ends
            key = stream_key("shards", self.split.fingerprint, self.seed, epoch)
            # Every process has its own: four bytes a shard.
            shards = permutation(len(ends), key=key).astype(np.uint32)
            lengths = np.diff(ends, prepend=0)[shards]
            starts = (np.cumsum(lengths) - lengths)[::BLOCK_SHARDS].copy()
            _remember(self._recent_epochs, epoch, (shards, starts))
        return self._recent_epochs[epoch]

    def _block_samples(self, epoch: int, block: int) -> np.ndarray:
        """Samples of one block, in order."""
        if (epoch, block) not in self._recent_blocks:
            shards, _ = self._blocks(epoch)
            chosen = shards[block * BLOCK_SHARDS : (block + 1) * BLOCK_SHARDS].tolist()
            spans = [self.samples_of(shard) for shard in chosen]
            samples = np.concatenate([np.arange(s.start, s.stop) for s in spans])

            key = stream_key("samples", self.split.fingerprint, self.seed, epoch, block)
            permuted = samples[permutation(len(samples), key=key)]
            _remember(self._recent_blocks, (epoch, block), permuted)
        return self._recent_blocks[epoch, block]


def _remember(recent: dict[Any, Any], key: Any, value: Any) -> None:
    """Evicts the oldest. Views and `shards_ahead` alternate between two entries."""
    if len(recent) == REMEMBERED:
        del recent[next(iter(recent))]
    recent[key] = value


def some_shards(num: int) -> np.ndarray:
    """Shards that stand for all in `check_mixed`: all of a few, or a random choice, in order."""
    return np.sort(np.random.default_rng(0).permutation(num)[:MIXED_SHARDS])


def check_mixed(
    labels: np.ndarray, *, shard_lengths: Sequence[int] | np.ndarray, where: str
) -> None:
    """Raise UserError for tars sorted by class, which the blocks of an epoch do not mix.

    labels: of each sample, tar after tar. Blocks need a tenth of the classes that they would have
    if all samples were shuffled.
    """
    num_blocks = -(-len(shard_lengths) // BLOCK_SHARDS)
    if num_blocks < 2 or labels.max(initial=-1) < 0:
        return
    # A random deal of tars to blocks stands for any epoch; the seed makes it repeatable.
    block = np.random.default_rng(0).permutation(len(shard_lengths)) // BLOCK_SHARDS
    shares = np.bincount(labels[labels >= 0]) / len(labels)
    # One number for each pair of block and class, so that `unique` counts the classes per block.
    classes = np.unique(np.repeat(block, shard_lengths) * len(shares) + labels)
    found = len(classes) / num_blocks
    # A class is missing from a random block with probability (1 - share) ** (samples of the block).
    shuffled = float((1 - (1 - shares) ** (len(labels) / num_blocks)).sum())

    if found < shuffled / 10:
        raise UserError(
            f"the tars are sorted by class: training mixes {BLOCK_SHARDS} of its {len(block):,} "
            f"tars at a time, which have {found:,.0f} classes; shuffled they would have "
            f"{shuffled:,.0f}",
            where=where,
            next_step="write shuffled ones, by vitscale prepare shards with "
            "source.kind=webdataset; tars for evaluation alone: 'source.splits={val: \"*.tar\"}'",
        )


class Draw(NamedTuple):
    """The sample at one position of training."""

    part: int
    """Which set of shards."""
    epoch: int
    """Completed passes over that set."""
    sample: int
    repeat: int
    """0, or with repeated augmentation how often the sample came before."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingOrder:
    """The infinite sequence over several sets of shards, each sample once or repeated.

    Each block of `MIXTURE_BLOCK` slots contains the share of each set, permuted; each set follows
    its own `SampleOrder`, independent of the others.
    """

    parts: tuple[SampleOrder, ...]
    shares: tuple[int, ...]
    """Parts per million of the samples; sum 1,000,000."""
    repeats: int = 1
    """Repeats of a sample are `REPEAT_BLOCK` positions apart, in one block of repeats times this.
    A global batch that is no multiple of it splits some. Hoffer et al. 2020; 3 in DeiT."""

    def at(self, position: int) -> Draw:
        """The sample at a position counted from the start of training. O(block)."""
        block, inside = divmod(position, self.repeats * REPEAT_BLOCK)
        repeat, slot = divmod(inside, REPEAT_BLOCK)

        part = 0
        part_position = block * REPEAT_BLOCK + slot
        if len(self.parts) > 1:
            block, slot = divmod(part_position, MIXTURE_BLOCK)
            parts, positions = _mixture_block(self, block)
            part = int(parts[slot])
            part_position = int(positions[slot])

        epoch, sample = self.parts[part].at(part_position)
        return Draw(part, epoch, sample, repeat)


# `eq=False` makes this cache compare by identity: comparing orders would be slow.
@lru_cache(maxsize=8)
def _mixture_block(order: TrainingOrder, block: int) -> tuple[np.ndarray, np.ndarray]:
    """(set, position in the set's own order) of each slot of one block."""

    def counts(num_slots: int) -> np.ndarray:
        """Slots of each set among the first `num_slots`."""
        # Counted from the start of training, so that roundings do not add up over the blocks.
        ends = [
            num_slots * share // MILLION for share in np.cumsum(order.shares).tolist()
        ]
        return np.diff([0, *ends])

    starts = counts(block * MIXTURE_BLOCK)
    ends = counts((block + 1) * MIXTURE_BLOCK)

    parts = np.repeat(np.arange(len(order.parts)), ends - starts)
    positions = np.concatenate(
        [np.arange(*span) for span in zip(starts, ends, strict=True)]
    )

    names = tuple(part.split.fingerprint for part in order.parts)
    chosen = permutation(
        MIXTURE_BLOCK, key=stream_key("mixture", names, order.parts[0].seed, block)
    )
    # The sets are permuted over the slots; each set keeps its own order.
    permuted_parts = parts[chosen]
    permuted_positions = np.empty_like(positions)
    for part in range(len(order.parts)):
        permuted_positions[permuted_parts == part] = positions[parts == part]
    return permuted_parts, permuted_positions


def rank_batches(
    *, start: int, stop: int, rank: int, world_size: int, micro_batch: int
) -> Iterator[list[int]]:
    """Positions of this rank's micro-batches between two positions of training.

    All ranks together process world_size * micro_batch consecutive positions per forward pass;
    `start` and `stop` are multiples of the global batch.
    """
    stride = world_size * micro_batch
    # With a partial step some ranks would have no batch, and the others would wait for them.
    assert (stop - start) % stride == 0
    for base in range(start, stop, stride):
        first = base + rank * micro_batch
        yield list(range(first, first + micro_batch))
