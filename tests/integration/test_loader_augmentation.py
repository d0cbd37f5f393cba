"""Augmentation inside the loader: on top of the same crops, from a stream of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.shard_folders import write_shard_folder
from vitscale.data.augment import augment
from vitscale.data.loader import open_loader, training_batches
from vitscale.data.order import CounterRandom
from vitscale.data.samples import augmentation_key
from vitscale.data.settings import DataSettings
from vitscale.data.training_set import open_training_set

NUM, SEED = 24, 7
AUGMENT = {
    "randaugment": {"num_ops": 2, "magnitude": 9, "policy": "timm", "magnitude_std": 0.5},
    "color_jitter": {"brightness": 0.4},
    "erasing": {"probability": 0.5, "mode": "pixel"},
}


def settings(folder: Path, **more: Any) -> DataSettings:
    return DataSettings.model_validate(
        {"path": str(folder), "global_batch": NUM, "mean": (0.4, 0.5, 0.6), "views": 2, **more}
    )


def images(data: DataSettings) -> torch.Tensor:
    loader = training_batches(
        open_training_set(data, seed=SEED),
        settings=data,
        image_size=16,
        seed=SEED,
        start=2 * NUM,
        stop=3 * NUM,
        rank=0,
        world_size=1,
        micro_batch=NUM,
        pin_memory=False,
    )
    with open_loader(loader) as batches:
        return torch.cat([batch.images.clone() for batch in batches])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_augmentation_comes_on_top_of_the_same_crops(tmp_path: Path, num_workers: int) -> None:
    folder = write_shard_folder(tmp_path / "shards", num_per_class=30, num_shards=3)
    plain = images(settings(folder, num_workers=0))
    data = settings(folder, num_workers=num_workers, augment=AUGMENT)
    augmented = images(data)
    order = open_training_set(data, seed=SEED).order
    changed = 0
    for row, position in enumerate(range(2 * NUM, 3 * NUM)):
        key = augmentation_key(SEED, order.at(position), purpose="augment2")
        expected = augment(
            plain[row], data.augment, CounterRandom(key), mean=data.mean, std=data.std
        )
        assert torch.equal(augmented[row], expected)
        changed += not torch.equal(augmented[row], plain[row])
    assert changed > NUM * 3 // 4
