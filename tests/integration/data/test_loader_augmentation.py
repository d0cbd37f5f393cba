"""Augmentation inside the loader: after the same crops, from a separate random stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.corpora.shard_folders import write_shard_folder
from vitscale.data.loader import open_loader, training_batches
from vitscale.data.samples import SplitReader, TrainingSamples, augmentation_key
from vitscale.data.settings import DataSettings
from vitscale.data.training_set import open_training_set
from vitscale.distributed.random_numbers import CounterRandom
from vitscale.images.augment import augment
from vitscale.images.crops import decode

NUM, SEED = 24, 7
AUGMENT = {
    "randaugment": {"num_ops": 2, "magnitude": 9, "policy": "timm", "magnitude_std": 0.5},
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


@pytest.mark.parametrize("decoder", ["pillow", "simplejpeg", "region"])
def test_plain_crops_are_windows_of_the_reflected_image(tmp_path: Path, decoder: str) -> None:
    """At the stored size nothing is resampled, so every pixel is known."""
    folder = write_shard_folder(tmp_path / "shards", num_per_class=12, num_shards=2)
    options = {"crop": "plain", "interpolation": "bicubic", "antialias": True, "num_workers": 0}
    data = settings(folder, decoder=decoder, **options)
    training_set = open_training_set(data, seed=SEED)
    reader = SplitReader(training_set.parts[0])
    samples = TrainingSamples(training_set, settings=data, image_size=32, seed=SEED)
    mirrored = 0
    for position in range(2 * NUM):
        crop = torch.empty(3, 32, 32, dtype=torch.uint8)
        samples.fill(position, crop)
        stored = decode(reader.bytes_of(training_set.order.at(position).sample)).numpy()
        assert stored.shape[0] == 32 < stored.shape[1]
        padded = np.pad(stored, ((4, 4), (4, 4), (0, 0)), mode="reflect").transpose(2, 0, 1)
        places = [(y, x) for y in range(9) for x in range(stored.shape[1] - 23)]
        windows = [padded[:, y : y + 32, x : x + 32] for y, x in places]
        plain, mirror = (
            min(np.abs(window.astype(int) - wanted.numpy()).max() for window in windows)
            for wanted in (crop, crop.flip(-1))
        )
        # Decoders differ from each other by a level or two.
        assert min(plain, mirror) <= 2 < max(plain, mirror)
        mirrored += mirror < plain
    assert NUM / 2 < mirrored < 2 * NUM - NUM / 2
