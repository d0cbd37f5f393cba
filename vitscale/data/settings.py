"""Settings of the `data` group: which samples, in what batches, how images become tensors.

Leaves out: reading (`index`, `loader`) and pixels (`images`).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vitscale.config.section import Section


class TrainingShards(Section):
    """One set of shards, or a part of it."""

    path: str
    """Folder of shards written by data_prep/make_shards.py (holds index.parquet, manifest.json)."""
    train_split: str = "train"
    first_percent: float = Field(default=100.0, gt=0, le=100)
    """Only the first share of the stored samples, which are shuffled; rounded up."""
    only_classes: tuple[str, ...] = Field(default=(), strict=False)
    """Only samples of these classes; labels stay what they are. Empty: all."""


class MixedInShards(TrainingShards):
    share: float = Field(ge=0.001, le=0.999)
    """Of all samples seen."""


class DataSettings(TrainingShards):
    mixture: tuple[MixedInShards, ...] = Field(default=(), strict=False)
    """Further sets with the same label map; `path` above gets the rest of the samples."""
    views: int = Field(default=1, gt=0, le=16)
    """Repeated augmentation: how often each sample comes, differently augmented. DeiT: 3."""
    val_split: str | None = "test"
    """Split evaluated during and after training; null: none."""
    global_batch: int = Field(gt=0)
    """Images per optimiser step over all ranks; micro-batch and accumulation follow from it."""
    planned_num_samples: int | None = Field(default=None, gt=0)
    """Training samples assumed by `--dry-run` while `path` is missing; the index decides later."""
    num_workers: int = Field(default=2, ge=0)
    """Loader processes per rank. Any number gives the same batches."""
    crop_area: tuple[float, float] = Field(default=(0.05, 1.0), strict=False)
    """Area share of the random crop: 5-100 %, the inception crop of the ViT paper's code."""
    crop_aspect: tuple[float, float] = Field(default=(3 / 4, 4 / 3), strict=False)
    horizontal_flip: bool = True
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    antialias: bool = False
    """False as in tf.image.resize, which the ViT and AugReg recipes used."""
    eval_resize: Literal["squash", "center_crop"] = "squash"
    """squash: whole image to a square (ViT paper's code). center_crop: short side, then centre."""
    eval_crop_fraction: float = Field(default=0.875, gt=0, le=1)
    """center_crop only: image size divided by the resized short side; 224/256 = 0.875."""
    mean: tuple[float, float, float] = Field(default=(0.5, 0.5, 0.5), strict=False)
    std: tuple[float, float, float] = Field(default=(0.5, 0.5, 0.5), strict=False)
    """0.5 / 0.5 maps pixels to [-1, 1], as the ViT paper's code does; DeiT uses ImageNet's."""
