"""Batches of images from a shard folder, resumable at any position.

Owns: reading samples by offset, augmenting them from their own counters, and the worker processes.
Leaves out: the order (`order`), pixels (`images`), normalising (`engine`).

A sample's bytes, crop and flip depend on (seed, epoch, sample) alone, so any number of ranks and
workers gives the same batches.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from vitscale.data import images
from vitscale.data.index import SplitIndex
from vitscale.data.order import CounterRandom, Draw, rank_batches, stream_key
from vitscale.data.settings import DataSettings
from vitscale.data.training_set import TrainingSet
from vitscale.errors import UserError

MAX_OPEN_SHARDS = 64


@dataclass(frozen=True, slots=True)
class Batch:
    """B images of one rank."""

    images: torch.Tensor
    """uint8 [B, 3, S, S]"""
    labels: torch.Tensor
    """int64 [B]"""
    weights: torch.Tensor
    """float32 [B]: 1 for a sample, 0 for the padding of an evaluation's last batch."""
    other_labels: torch.Tensor | None = None
    """int64 [B], with mixing: labels of the images mixed in."""
    own_shares: torch.Tensor | None = None
    """float32 [B], with mixing: how much of each image is its own."""

    def to(self, device: torch.device) -> Batch:
        return Batch(
            self.images.to(device, non_blocking=True),
            self.labels.to(device, non_blocking=True),
            self.weights.to(device, non_blocking=True),
        )


@lru_cache(maxsize=MAX_OPEN_SHARDS)
def _shard_descriptor(path: Path, process: int) -> int:
    """An open file per shard and process; pread needs no position, so it is shared freely."""
    return os.open(path, os.O_RDONLY)


class Samples:
    """Reads and decodes samples of one split."""

    def __init__(self, index: SplitIndex) -> None:
        self.index = index

    def pixels(self, sample: int) -> torch.Tensor:
        """Decoded image, uint8 [H, W, 3]. Raises UserError naming the sample if it cannot be."""
        index = self.index
        path = index.shard_paths[index.shard_of[sample]]
        try:
            file = _shard_descriptor(path, os.getpid())
            data = os.pread(file, int(index.length[sample]), int(index.offset[sample]))
            return images.decode(data)
        except (OSError, ValueError) as error:
            raise UserError(
                f"sample {index.keys[sample]!r} cannot be read ({error})",
                where=str(path),
                next_step="make the shards again: they changed since data preparation",
            ) from None


class TrainingSamples(Dataset[tuple[torch.Tensor, int]]):
    """Augmented samples by position in training."""

    def __init__(
        self, training_set: TrainingSet, *, settings: DataSettings, image_size: int, seed: int
    ) -> None:
        self.parts = [Samples(part) for part in training_set.parts]
        self.order, self.seed = training_set.order, seed
        self.settings, self.image_size = settings, image_size

    def __getitem__(self, position: int) -> tuple[torch.Tensor, int]:
        draw = self.order.at(position)
        samples = self.parts[draw.part]
        pixels = samples.pixels(draw.sample)
        random = CounterRandom(augmentation_key(self.seed, draw))
        settings = self.settings
        height, width = pixels.shape[:2]
        box = images.random_crop_box(
            width, height, area=settings.crop_area, aspect=settings.crop_aspect, random=random
        )
        image = images.crop_and_resize(
            pixels,
            box,
            size=self.image_size,
            interpolation=settings.interpolation,
            antialias=settings.antialias,
            flip=settings.horizontal_flip and random.uniform() < 0.5,
        )
        return image, int(samples.index.label[draw.sample])


def augmentation_key(seed: int, draw: Draw) -> int:
    """What the augmentation of one sample at one position depends on."""
    further = (draw.part, draw.view) if draw.part or draw.view else ()
    return stream_key("augment", seed, draw.epoch, draw.sample, *further)


class EvaluationSamples(Dataset[tuple[torch.Tensor, int]]):
    """Samples by stored position, resized without chance."""

    def __init__(self, index: SplitIndex, *, settings: DataSettings, image_size: int) -> None:
        self.samples = Samples(index)
        self.settings, self.image_size = settings, image_size

    def __getitem__(self, sample: int) -> tuple[torch.Tensor, int]:
        pixels = self.samples.pixels(sample)
        height, width = pixels.shape[:2]
        box = images.CropBox(0, 0, width, height)
        if self.settings.eval_resize == "center_crop":
            fraction = self.settings.eval_crop_fraction
            box = images.center_crop_box(width, height, fraction=fraction)
        image = images.crop_and_resize(
            pixels,
            box,
            size=self.image_size,
            interpolation=self.settings.interpolation,
            antialias=True,
            flip=False,
        )
        return image, int(self.samples.index.label[sample])


def _collate(samples: Sequence[tuple[torch.Tensor, int]]) -> Batch:
    pixels, labels = zip(*samples, strict=True)
    return Batch(torch.stack(pixels), torch.tensor(labels), torch.ones(len(labels)))


def _start_worker(worker: int) -> None:
    """Leave the signals meant for the trainer to the trainer; keep each worker to one thread."""
    for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)


def _batches(
    dataset: Dataset[tuple[torch.Tensor, int]],
    positions: Sequence[list[int]],
    *,
    num_workers: int,
    pin_memory: bool,
) -> DataLoader[Batch]:
    return DataLoader(
        dataset,  # type: ignore[arg-type]  # stubs do not know that collate_fn changes the type
        batch_sampler=positions,
        num_workers=num_workers,
        collate_fn=_collate,
        pin_memory=pin_memory,
        worker_init_fn=_start_worker,
    )


class _PositionBatches(Sequence[list[int]]):
    """`rank_batches` as the lazily read sequence that DataLoader samples from."""

    def __init__(self, **span: int) -> None:
        self.span = span

    def __iter__(self) -> Iterator[list[int]]:
        return rank_batches(**self.span)

    def __len__(self) -> int:
        span = self.span
        return (span["stop"] - span["start"]) // (span["world_size"] * span["micro_batch"])

    def __getitem__(self, number: int) -> list[int]:  # type: ignore[override]  # no slices needed
        raise NotImplementedError


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
) -> DataLoader[Batch]:
    """Micro-batches of one rank between two positions (samples seen) of training."""
    positions = _PositionBatches(
        start=start, stop=stop, rank=rank, world_size=world_size, micro_batch=micro_batch
    )
    dataset = TrainingSamples(training_set, settings=settings, image_size=image_size, seed=seed)
    return _batches(dataset, positions, num_workers=settings.num_workers, pin_memory=pin_memory)


def evaluation_batches(
    index: SplitIndex,
    *,
    settings: DataSettings,
    image_size: int,
    rank: int,
    world_size: int,
    micro_batch: int,
    pin_memory: bool,
) -> Iterator[Batch]:
    """Every sample once over all ranks; all ranks get equally many batches (ZeRO-3 needs that).

    Missing samples of the last batches are padding with weight 0.
    """
    stride = world_size * micro_batch
    num_batches = -(-index.num_samples // stride)
    own = np.arange(num_batches * stride).reshape(num_batches, world_size, micro_batch)[:, rank]
    positions = np.minimum(own, index.num_samples - 1).tolist()
    dataset = EvaluationSamples(index, settings=settings, image_size=image_size)
    loader = _batches(dataset, positions, num_workers=settings.num_workers, pin_memory=pin_memory)
    with open_loader(loader) as batches:
        for batch, stored in zip(batches, own, strict=True):
            weights = torch.from_numpy((stored < index.num_samples).astype(np.float32))
            yield Batch(batch.images, batch.labels, weights)


@contextmanager
def open_loader(loader: DataLoader[Batch]) -> Iterator[Iterator[Batch]]:
    """Iterate a loader and end its workers with the block.

    They ignore SIGTERM, so Python's own clean-up at exit would wait for them for ever.
    """
    batches = iter(loader)
    try:
        yield batches
    finally:
        shutdown = getattr(batches, "_shutdown_workers", None)  # absent without workers
        if shutdown is not None:
            shutdown()
