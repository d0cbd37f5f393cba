"""Our training loader as the benchmarks measure it: random crop, flip, batches of 64."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vitscale.data.loader import training_batches
from vitscale.data.samples import view_shapes
from vitscale.data.settings import DataSettings, ViewSettings
from vitscale.data.training_set import TrainingSet, open_training_set

BATCH = 64
SIDE = 224  # pixels a side of the output, unless given
SEED = 0
# DINOv2's views: shares of the image's area of large and small crops, pixels a side of small ones.
GLOBAL_AREA = (0.32, 1.0)
LOCAL_AREA = (0.05, 0.32)
LOCAL_SIDE = 96
NUM_LOCALS = 8

Pixels = torch.Tensor | None
Batches = Generator[tuple[Pixels, torch.Tensor], None, None]


@dataclass(frozen=True, slots=True)
class Task:
    """What every loader is given."""

    shards: Path
    workers: int
    side: int
    """Pixels a side of the output."""


def views_of(
    area: tuple[float, float], num: int, num_local: int = 0
) -> list[ViewSettings]:
    """`num` crops of the output's size, then `num_local` small ones."""
    views = [ViewSettings(name="global", count=num, crop_area=area)]
    if num_local:
        small = ViewSettings(
            name="local", count=num_local, image_size=LOCAL_SIDE, crop_area=LOCAL_AREA
        )
        views.append(small)
    return views


def data_settings(
    shards: Path,
    *,
    workers: int,
    decoder: str = "region",
    antialias: bool = False,
    views: Sequence[ViewSettings] = (),
) -> DataSettings:
    return DataSettings(
        # Local shards with an index: the default, and the fastest way to read.
        path=str(shards),
        global_batch=BATCH,
        num_workers=workers,
        decoder=decoder,
        antialias=antialias,
        views=tuple(views),
    )


def ours(
    task: Task,
    *,
    decoder: str = "auto",
    antialias: bool = False,
    entry_points: bool = True,
    views: Sequence[ViewSettings] = (),
) -> Batches:
    """As training reads: `training_batches`. Yields the first crops of several views."""
    settings = data_settings(
        task.shards,
        workers=task.workers,
        decoder=decoder,
        antialias=antialias,
        views=views,
    )
    training_set = open_training_set(settings, seed=SEED)

    # As if the shards had been prepared without them: images are then decoded from their top.
    if not entry_points:
        parts = tuple(
            replace(part, has_entry_points=False) for part in training_set.parts
        )
        training_set = replace(training_set, parts=parts)

    # A million batches: the measurement ends long before the stream does.
    loader = training_loader(
        settings,
        start=0,
        stop=BATCH << 20,
        side=task.side,
        training_set=training_set,
    )
    shapes = view_shapes(settings, task.side)
    with loader as batches:
        for batch in batches:
            if views:
                batch = batch.with_views(shapes)
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
