"""The exported preprocessing gives the pixels that evaluations see."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from tests.support.corpora.photographs import jpeg, photograph
from tests.support.engine.small_models import export, small_model
from vitscale.data.samples import EvaluationResize
from vitscale.data.settings import DataSettings

SIDE = 64
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
PHOTO = photograph(250, 187)


def own_pixels(how: dict[str, Any], data: bytes) -> torch.Tensor:
    """Levels [3, S, S] as evaluations see them."""
    out = torch.empty(3, SIDE, SIDE, dtype=torch.uint8)
    EvaluationResize(DataSettings(path="x", global_batch=1, **how), image_size=SIDE)(data, out)
    return out.float()


def exported(folder: Path, to: str, how: dict[str, Any]) -> Path:
    sizes = {"image_size": SIDE, "patch_size": 16}
    return export(small_model(**sizes, preprocessing=how, classes=tuple("vwxyz")), to, folder)


def levels(normalised_3SS: torch.Tensor) -> torch.Tensor:
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return ((normalised_3SS * std + mean) * 255).round()


def timm_pixels(folder: Path, image: Image.Image) -> torch.Tensor:
    model = timm.create_model(f"local-dir:{folder}", pretrained=True)
    transform: Any = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    return levels(transform(image))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("fraction", [None, 0.8, 1.0])
def test_timm_makes_the_same_pixels(
    tmp_path: Path, fraction: float | None, interpolation: str
) -> None:
    """A crop on noise, where half a pixel of shift changes every value; else a photo squashed."""
    how = {"mean": MEAN, "std": STD, "eval_interpolation": interpolation}
    if fraction is not None:
        how |= {"eval_resize": "center_crop", "eval_crop_fraction": fraction}
    folder = exported(tmp_path / "out", "timm", how)
    for width, height in ((101, 100), (250, 187), (187, 251)):
        noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
        data = jpeg(PHOTO if fraction is None else Image.fromarray(noise))
        found = timm_pixels(folder, Image.open(io.BytesIO(data)))
        assert (found - own_pixels(how, data)).abs().max() <= 1, (width, height)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["timm", "huggingface"])
@pytest.mark.parametrize("resize", ["squash", "center_crop"])
def test_transformers_sees_the_pixels_of_timm(tmp_path: Path, to: str, resize: str) -> None:
    from transformers import AutoConfig, AutoImageProcessor

    how = {"mean": MEAN, "std": STD, "eval_resize": resize, "eval_interpolation": "bicubic"}
    reference = timm_pixels(exported(tmp_path / "timm", "timm", how), PHOTO)
    folder = exported(tmp_path / "out", to, how)
    # transformers' default backend differs from Pillow by one level; timm's wrapper has none.
    options: dict[str, Any] = {"backend": "pil"} if to == "huggingface" else {}
    processor: Any = AutoImageProcessor.from_pretrained(folder, **options)
    found = levels(processor(PHOTO, return_tensors="pt")["pixel_values"][0])
    assert (found - reference).abs().max() <= 1
    if to == "huggingface":  # timm's wrapper takes RGB only
        grey = processor(PHOTO.convert("L"), return_tensors="pt")["pixel_values"]
        assert grey.shape == (1, 3, SIDE, SIDE)
    labels: Any = AutoConfig.from_pretrained(folder)
    assert [labels.id2label[label] for label in range(5)] == list("vwxyz")
