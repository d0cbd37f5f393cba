"""Load batches in worker processes, from any position of training.

Leaves out: the order (`order`), single samples (`samples`), worker processes (`workers`),
normalisation (`engine`).
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from vitscale.data.index import SplitIndex
from vitscale.data.order import rank_batches
from vitscale.data.samples import EvaluationSamples, StreamedSamples, TrainingSamples
from vitscale.data.settings import DataSettings
from vitscale.data.training_set import TrainingSet
from vitscale.data.workers import Filled, Samples, Unreadable, Workers, fill_batch

# A run ends with an error if a loader process gives no batch for this long.
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Batch:
    """B images of one rank."""

    images: torch.Tensor
    """uint8 [B, 3, rows, columns]"""
    labels: torch.Tensor
    """int64 [B]"""
    weights: torch.Tensor
    """float32 [B]: 1 for a sample, 0 for the padding of an evaluation's last batch."""
    unreadable: tuple[Unreadable, ...] = ()
    """Samples that were substituted."""
    mixed_labels: torch.Tensor | None = None
    """int64 [B], with mixing: labels of the partner images."""
    mix_lambda: torch.Tensor | None = None
    """float32 [B], with mixing: the share that each image keeps of itself."""
    positions: np.ndarray | None = None
    """int64 [B]: in training the positions of the images in training, counted from 0, so that
    random draws do not depend on the number of ranks; in an evaluation their numbers in the
    split."""

    def to(self, device: torch.device) -> Batch:
        return Batch(
            self.images.to(device, non_blocking=True),
            self.labels.to(device, non_blocking=True),
            self.weights.to(device, non_blocking=True),
            self.unreadable,
        )

    def keep_for(self, stream: torch.cuda.Stream) -> None:
        """Once freed, a GPU's memory is used again only after what this stream does until then."""
        for tensor in (self.images, self.labels, self.weights):
            tensor.record_stream(stream)


@dataclass(frozen=True, slots=True)
class Loader:
    """Where the batches of a rank come from; `open_loader` gives them."""

    samples: Samples
    positions: Iterable[Sequence[int]]
    """Of each batch."""
    batch: int
    """Positions of the largest batch."""
    settings: DataSettings
    pin_memory: bool


def training_batches(
    training_set: TrainingSet,
    *,
    settings: DataSettings,
    image_size: int,
    seed: int,
    start: int,
    stop: int,
    rank: int,
    world_size: int,
    micro_batch: int,
    pin_memory: bool,
) -> Loader:
    """Micro-batches of one rank between two positions of training (samples seen).

    The position decides which samples they have; of streamed tars only how many.
    """
    positions = rank_batches(
        start=start, stop=stop, rank=rank, world_size=world_size, micro_batch=micro_batch
    )
    samples: Samples
    if training_set.streamed is None:
        samples = TrainingSamples(training_set, settings=settings, image_size=image_size, seed=seed)
    else:
        samples = StreamedSamples(
            training_set.streamed,
            settings=settings,
            image_size=image_size,
            seed=seed,
            start=start,
            rank=rank,
            world_size=world_size,
        )
    return Loader(samples, positions, micro_batch, settings, pin_memory)


def evaluation_batches(
    index: SplitIndex,
    *,
    settings: DataSettings,
    image_size: int,
    rank: int,
    world_size: int,
    micro_batch: int,
    pin_memory: bool,
    samples: np.ndarray | None = None,
) -> Generator[Batch, None, None]:
    """Every sample once over all ranks, in equally many batches per rank, as ZeRO-3 requires.

    samples: numbers of the samples to take, at least one; None: all.
    The last batches are padded with samples of weight 0.
    """
    chosen = np.arange(index.num_samples) if samples is None else samples
    stride = world_size * micro_batch
    num_batches = -(-len(chosen) // stride)
    own = np.arange(num_batches * stride).reshape(num_batches, world_size, micro_batch)[:, rank]
    positions = chosen[np.minimum(own, len(chosen) - 1)].tolist()
    reader = EvaluationSamples(index, settings=settings, image_size=image_size)
    batches = batches_of(reader, positions, settings=settings, pin_memory=pin_memory)
    with closing(batches):
        for batch, stored in zip(batches, own, strict=True):
            weights = torch.from_numpy((stored < len(chosen)).astype(np.float32))
            numbers = chosen[np.minimum(stored, len(chosen) - 1)]
            yield Batch(batch.images, batch.labels, weights, positions=numbers)


def batches_of(
    samples: Samples,
    positions: Sequence[Sequence[int]],
    *,
    settings: DataSettings,
    pin_memory: bool,
) -> Generator[Batch, None, None]:
    """One batch for each list of positions, in order; the first list is the longest."""
    size = len(positions[0]) if positions else 0
    with open_loader(Loader(samples, positions, size, settings, pin_memory)) as batches:
        yield from batches


@contextmanager
def open_loader(loader: Loader) -> Iterator[Iterator[Batch]]:
    """Iterate over a loader, once. Its workers start to fill batches at once.

    Raises WorkerError, naming the worker, if one dies or gives no batch for `TIMEOUT_S`, and
    RankError for what a worker cannot read. The end of the block waits for no worker.
    """
    pinned, num_workers = loader.pin_memory, loader.settings.num_workers
    if num_workers == 0:
        yield (_copied(filled, pinned=pinned) for filled in _filled_here(loader))
        return
    workers = Workers(
        loader.samples,
        loader.positions,
        batch=loader.batch,
        num_workers=num_workers,
        timeout_s=TIMEOUT_S,
    )
    with closing(workers):
        yield (_copied(filled, pinned=pinned) for filled in workers)


def _filled_here(loader: Loader) -> Iterator[Filled]:
    size = loader.samples.image_size
    images = torch.empty(loader.batch, 3, size, size, dtype=torch.uint8)
    loader.samples.start(worker=0, num_workers=1)
    for positions in loader.positions:
        labels, unreadable = fill_batch(loader.samples, positions, images)
        yield Filled(images[: len(positions)], labels, unreadable)


def _copied(filled: Filled, *, pinned: bool) -> Batch:
    """Copy a batch out of its slot. From pinned memory copies to the GPU are asynchronous."""
    labels, weights = torch.tensor(filled.labels), torch.ones(len(filled.labels))
    unreadable = tuple(filled.unreadable)
    if pinned:
        images = filled.images.pin_memory()
        return Batch(images, labels.pin_memory(), weights.pin_memory(), unreadable)
    # By numpy: torch's threads would wait for cores that decode, and its memory has small pages.
    images = torch.from_numpy(filled.images.numpy().copy())
    return Batch(images, labels, weights, unreadable)
