"""Our training loader as the benchmarks measure it: random crop, flip, batches of 64."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vitscale.data.loader import training_batches
from vitscale.data.settings import DataSettings
from vitscale.data.training_set import TrainingSet, open_training_set

BATCH = 64
SIDE = 224  # pixels a side of the output, unless given
SEED = 0

Pixels = torch.Tensor | None
Batches = Generator[tuple[Pixels, torch.Tensor], None, None]


@dataclass(frozen=True, slots=True)
class Task:
    """What every loader is given."""

    shards: Path
    workers: int
    side: int
    """Pixels a side of the output."""


def data_settings(
    shards: Path, *, workers: int, decoder: str = "region", antialias: bool = False
) -> DataSettings:
    return DataSettings(
        # Local shards with an index: the default, and the fastest way to read.
        path=str(shards),
        global_batch=BATCH,
        num_workers=workers,
        decoder=decoder,
        antialias=antialias,
    )


def ours(
    task: Task, *, decoder: str, antialias: bool = False, entry_points: bool = True
) -> Batches:
    """As training reads: `training_batches`."""
    settings = data_settings(
        task.shards, workers=task.workers, decoder=decoder, antialias=antialias
    )
    training_set = open_training_set(settings, seed=SEED)

    # As if the shards had been prepared without them: images are then decoded from their top.
    if not entry_points:
        parts = tuple(replace(part, entry_points=()) for part in training_set.parts)
        training_set = replace(training_set, parts=parts)

    # A million batches: the measurement ends long before the stream does.
    loader = training_loader(
        settings,
        start=0,
        stop=BATCH << 20,
        side=task.side,
        training_set=training_set,
    )
    with loader as batches:
        for batch in batches:
            yield batch.images, batch.labels


def training_loader(
    settings: DataSettings,
    *,
    start: int,
    stop: int,
    side: int = SIDE,
    training_set: TrainingSet | None = None,
) -> Any:
    return training_batches(
        training_set or open_training_set(settings, seed=SEED),
        settings=settings,
        image_size=side,
        seed=SEED,
        start=start,
        stop=stop,
        rank=0,
        world_size=1,
        micro_batch=BATCH,
        # The rivals give ordinary memory, too.
        pin_memory=False,
    )
