"""Which read errors are substituted, and which end the run."""

from __future__ import annotations

import errno
import os
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.corpora.shard_folders import write_shard_folder
from vitscale.config.errors import UserError
from vitscale.data import index as index_module
from vitscale.data.index import read_split
from vitscale.data.loader import evaluation_batches
from vitscale.data.samples import Augmentation, EvaluationSamples, TrainingSamples, augmentation_key
from vitscale.data.settings import DataSettings
from vitscale.data.training_set import open_training_set
from vitscale.distributed.random_numbers import CounterRandom
from vitscale.images import crops
from vitscale.images.crops import DECODERS, missing

SIZE = 16
OUT = torch.empty(3, SIZE, SIZE, dtype=torch.uint8)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return write_shard_folder(tmp_path / "shards", num_per_class=6, num_shards=3)


def training(shards: Path, **changes: Any) -> TrainingSamples:
    data = DataSettings(path=str(shards), global_batch=4, **changes)
    augmentation = Augmentation(data, image_size=SIZE, seed=0)
    return TrainingSamples(open_training_set(data, seed=0), augmentation)


def evaluation(shards: Path, **changes: Any) -> EvaluationSamples:
    data = DataSettings(path=str(shards), global_batch=4, **changes)
    return EvaluationSamples(read_split(shards, split="train"), settings=data, image_size=SIZE)


def request_of(box: tuple[int, int, int, int], **more: Any) -> crops.CropRequest:
    options = {"size": SIZE, "interpolation": "bilinear", "antialias": False, "flip": False}
    return crops.CropRequest(box=crops.CropBox(*box), **options | more)


def failing_once(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Make the first `os.pread` of a shard raise this error."""
    real, calls = os.pread, []

    def fail(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) == 1:
            raise OSError(number, os.strerror(number))
        return real(*arguments)

    monkeypatch.setattr(index_module.os, "pread", fail)


def test_a_bad_block_is_substituted_in_training_only(
    shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = training(shards)
    with monkeypatch.context() as patch:
        failing_once(patch, errno.EIO)
        _, (lost,) = samples.fill(0, OUT)
    assert "Input/output error" in lost.error
    with monkeypatch.context() as patch:
        failing_once(patch, errno.EIO)
        with pytest.raises(UserError, match="'train-00003' cannot be read"):
            evaluation(shards).fill(3, OUT)


def test_a_machine_error_ends_the_run_without_a_substitute(
    shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for samples in (training(shards), evaluation(shards)):
        with monkeypatch.context() as patch:
            failing_once(patch, errno.ESTALE)
            with pytest.raises(UserError, match=r"^[^']*\.tar: cannot be read \(Stale"):
                samples.fill(0, OUT)
        assert samples.fill(0, OUT)[1] == []


def test_damage_that_decodes_is_found_in_every_16th_sample(shards: Path) -> None:
    samples = training(shards)
    index = samples.parts[0]
    for path in index.shards:
        data = bytearray(path.read_bytes())
        for start, length in zip(index.offset, index.length, strict=True):
            end = min(int(start + length), len(data))
            if data[end - 2 : end] == b"\xff\xd9":
                data[end - 3] ^= 1  # the last coefficients
        path.write_bytes(data)
    for position in range(1, 16):
        assert samples.fill(position, OUT)[1] == []
    for position in (0, 16):
        with pytest.raises(UserError, match="do not have the hash in the index.*8 substitutes"):
            samples.fill(position, OUT)


@pytest.mark.parametrize("decoder", [name for name in DECODERS if missing(name) is None])
@pytest.mark.parametrize("fraction", [None, 0.8])
def test_evaluation_resamples_as_its_settings_say(
    shards: Path, decoder: str, fraction: float | None
) -> None:
    """Against the whole picture, resized with torch or averaged."""
    more: dict[str, Any] = {"decoder": decoder}
    pixels = crops.decode(evaluation(shards).index.read(2))
    height, width, _ = pixels.shape
    resized, inside, means = (SIZE, SIZE), (slice(None), slice(None)), (SIZE, SIZE)
    if fraction is not None:
        more |= {"eval_resize": "center_crop", "eval_crop_fraction": fraction}
        _, resized, (top, left) = crops.center_crop(width, height, size=SIZE, fraction=fraction)
        inside = slice(top, top + SIZE), slice(left, left + SIZE)
        # The short side becomes 16 / 0.8 = 20 pixels.
        means = tuple(round(side * 20 / min(height, width)) for side in (height, width))
    found = set()
    for name, antialias in product(("bilinear", "bicubic"), (False, True)):
        samples = evaluation(shards, eval_interpolation=name, eval_antialias=antialias, **more)
        samples.fill(2, OUT)
        request = request_of(
            (0, 0, width, height), size=resized, interpolation=name, antialias=antialias
        )
        assert torch.equal(OUT, crops.crop_and_resize(pixels, request)[:, *inside])
        found.add(OUT.numpy().tobytes())
    assert len(found) == 4
    evaluation(shards, eval_interpolation="area", **more).fill(2, OUT)
    assert torch.equal(OUT, crops.area_resized(pixels, resized=means, size=SIZE))


def test_inception_tf_takes_boxes_of_its_own(shards: Path) -> None:
    """All else equal, the pixels are those of the box that the sample's key draws."""
    samples = training(shards, crop="inception_tf", crop_aspect=(0.75, 1.33))
    for position in range(4):
        samples.fill(position, OUT)
        draw = samples.order.at(position)
        pixels = crops.decode(samples.parts[0].read(draw.sample))
        random = CounterRandom(augmentation_key(0, draw))
        height, width, _ = pixels.shape
        box = crops.tf_crop_box(width, height, area=(0.05, 1.0), aspect=(0.75, 1.33), random=random)
        corners = (box.left, box.top, box.width, box.height)
        request = request_of(corners, flip=random.uniform() < 0.5)
        assert torch.equal(OUT, crops.crop_and_resize(pixels, request))


def test_each_sample_is_evaluated_once_and_padding_has_no_weight(shards: Path) -> None:
    index = read_split(shards, split="train")
    data = DataSettings(path=str(shards), global_batch=4, num_workers=0)
    chosen, counted = np.arange(1, 8), []
    for rank in range(2):
        batches = evaluation_batches(
            index, settings=data, image_size=SIZE, rank=rank, world_size=2, micro_batch=3,
            pin_memory=False, samples=chosen,
        )  # fmt: skip
        for batch in batches:
            assert batch.weights is not None and set(batch.weights.tolist()) <= {0.0, 1.0}
            counted += batch.positions[batch.weights.numpy() == 1].tolist()
    assert sorted(counted) == chosen.tolist()
