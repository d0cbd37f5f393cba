"""Augmentation as a whole, 3-Augment and erasing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.corpora.scripted_images import HALF, MEAN, STD, Scripted, photo
from vitscale.data.settings import DataSettings, augment_problems
from vitscale.distributed.random_numbers import CounterRandom
from vitscale.images.augment import augment
from vitscale.images.settings import AugmentSettings, ErasingSettings, RandAugmentSettings

EVERYTHING = AugmentSettings(
    randaugment=RandAugmentSettings(num_ops=2, magnitude=9, policy="timm", magnitude_std=0.5),
    erasing=ErasingSettings(probability=0.7, mode="pixel"),
)

VARIANTS = {
    "timm, erasing": EVERYTHING,
    "augreg": AugmentSettings(randaugment=RandAugmentSettings(num_ops=2, magnitude=15)),
    "augreg 20": AugmentSettings(randaugment=RandAugmentSettings(num_ops=5, magnitude=20)),
    "three": AugmentSettings(three_augment=True),
    "erasing": AugmentSettings(erasing=ErasingSettings(probability=1, mode="rand")),
}


def run(image: torch.Tensor, settings: AugmentSettings, key: int) -> torch.Tensor:
    return augment(image, settings, CounterRandom(key), mean=MEAN, std=STD)


def test_off_is_the_identity_and_draws_nothing() -> None:
    image = photo()
    assert augment(image, AugmentSettings(), Scripted(), mean=HALF, std=HALF) is image


@pytest.mark.parametrize("name", VARIANTS)
@given(
    height=st.integers(1, 30),
    width=st.integers(1, 30),
    low=st.integers(0, 255),
    key=st.integers(0, 2**64 - 1),
)
@settings(max_examples=25, deadline=None)
def test_any_image_stays_an_image(name: str, height: int, width: int, low: int, key: int) -> None:
    levels = np.random.default_rng(key).integers(low, 256, (3, height, width), dtype=np.uint8)
    image = torch.from_numpy(levels)
    before = image.clone()
    result = run(image, VARIANTS[name], key)
    assert result.dtype == torch.uint8 and result.shape == image.shape
    assert torch.equal(image, before)
    assert torch.equal(result, run(image, VARIANTS[name], key)), "not a function of the key"


@pytest.mark.parametrize("name", VARIANTS)
def test_keys_matter_and_global_generators_do_not(name: str) -> None:
    image, settings = photo(224), VARIANTS[name]
    first = [run(image, settings, key) for key in range(8)]
    torch.manual_seed(99)
    np.random.seed(99)
    state = torch.get_rng_state()
    again = [run(image, settings, key) for key in range(8)]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert len({image.numpy().tobytes() for image in first}) >= 6


@pytest.mark.parametrize("mode", ["const", "rand", "pixel"])
def test_erasing_fills_one_box(mode: str) -> None:
    image = torch.full((3, 64, 64), 255, dtype=torch.uint8)
    options = AugmentSettings(erasing=ErasingSettings(probability=0.25, mode=mode))
    shares, values = [], []
    for key in range(2000):
        erased = run(image, options, key << 20)
        changed = (erased != 255).any(dim=0)
        if changed.any():
            rows, columns = changed.any(dim=1).nonzero(), changed.any(dim=0).nonzero()
            box = erased[:, rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
            shares.append(box[0].numel() / 64**2)
            values.append(box)
    assert len(shares) == pytest.approx(500, rel=0.2)
    assert min(shares) > 0.015 and 0.3 < max(shares) < 0.36
    pixels = torch.cat([box.flatten(1) for box in values], dim=1).double()
    for channel in range(3):
        assert pixels[channel].mean() == pytest.approx(255 * MEAN[channel], abs=5.0)
        if mode == "const":
            assert pixels[channel].unique().tolist() == [round(255 * MEAN[channel])]
        if mode == "pixel":
            assert pixels[channel].std() == pytest.approx(255 * STD[channel], rel=0.05)  # cut off
    assert all((box == box[:, :1, :1]).all() for box in values) == (mode != "pixel")
    if mode == "rand":
        assert len({tuple(box[:, 0, 0].tolist()) for box in values}) > 400


def data_with(augment: AugmentSettings) -> DataSettings:
    return DataSettings(path="shards", global_batch=8, augment=augment)


def test_conflicts_are_named() -> None:
    timm_15 = RandAugmentSettings(magnitude=15, policy="timm")
    wrong = AugmentSettings(randaugment=timm_15, three_augment=True)
    assert {key for key, _ in augment_problems(data_with(wrong))} == {
        "data.augment.three_augment",
        "data.augment.randaugment.magnitude",
    }
    for name, value in (("magnitude_std", 0.5), ("fill", "mean"), ("interpolation", "bicubic")):
        ignored = RandAugmentSettings.model_validate({name: value})
        assert [
            key for key, _ in augment_problems(data_with(AugmentSettings(randaugment=ignored)))
        ] == [f"data.augment.randaugment.{name}"]
    plain = DataSettings(path="shards", global_batch=8, crop="plain", crop_area=(0.5, 1.0))
    assert [key for key, _ in augment_problems(plain)] == ["data.crop_area"]
    area = DataSettings(
        path="shards", global_batch=8, eval_interpolation="area", eval_antialias=False
    )
    assert [key for key, _ in augment_problems(area)] == ["data.eval_antialias"]
    for fine in (EVERYTHING, AugmentSettings()):
        assert not list(augment_problems(data_with(fine)))
