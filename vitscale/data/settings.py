"""Settings of the `data` group: which samples, in what batches, how images become tensors.

Leaves out: reading (`index`, `loader`) and pixels (`images`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from vitscale.config.section import Section
from vitscale.data.remote.settings import RemoteSettings
from vitscale.data.remote.urls import is_url, url_problem
from vitscale.images.settings import AugmentSettings


class MixingSettings(Section):
    """Mixup and CutMix of neighbours in the order of training; needs an even micro-batch."""

    mixup_alpha: float | None = Field(default=None, gt=0)
    """Shares are drawn from Beta(alpha, alpha); null: no mixup. AugReg .2 to .8, DeiT .8."""
    cutmix_alpha: float | None = Field(default=None, gt=0)
    """The same for the share of the area; null: no CutMix. DeiT 1."""
    switch_probability: float = Field(default=0.5, ge=0, le=1)
    """With both: how often CutMix."""
    mode: Literal["batch", "pair"] = "batch"
    """batch: one draw for a whole global batch, as in AugReg. pair: one for each two images."""


class TrainingShards(Section):
    """One set of shards, or a part of it."""

    path: str
    """Folder of shards written by data_prep/make_shards.py (holds index.parquet, manifest.json), or
    its URL: http, https, s3, gs."""
    train_split: str = "train"
    """Split that training reads."""
    first_percent: float = Field(default=100.0, gt=0, le=100)
    """Only the first share of the stored samples, rounded up: a random part of what make_shards.py
    wrote, which is shuffled; of tars indexed in place the first as they lie there."""
    only_classes: tuple[str, ...] = Field(default=(), strict=False)
    """Only samples of these classes; labels stay what they are. Empty: all."""


class MixedInShards(TrainingShards):
    """A further set of shards and its share of the samples."""

    share: float = Field(ge=0.001, le=0.999)
    """Of all samples seen."""


class DataSettings(TrainingShards):
    """Which samples, in what batches, and how images become tensors."""

    mixture: tuple[MixedInShards, ...] = Field(default=(), strict=False)
    """Further sets with the same label map; `path` above gets the rest of the samples."""
    views: int = Field(default=1, gt=0, le=16)
    """Repeated augmentation: how often each sample comes, differently augmented. DeiT: 3. All in
    one global batch where `global_batch` is a multiple of 64 * views."""
    val_split: str | None = "test"
    """Split evaluated during and after training; null: none."""
    global_batch: int = Field(gt=0)
    """Images per optimiser step over all ranks; micro-batch and accumulation follow from it."""
    planned_num_samples: int | None = Field(default=None, gt=0)
    """Training samples assumed by `--dry-run` while `path` is missing; the index decides later."""
    num_workers: int = Field(default=2, ge=0)
    """Loader processes per rank. Any number gives the same batches."""
    decoder: str = "auto"
    """region, simplejpeg, pillow, or auto: the first of these that works here."""
    timeout_s: float = Field(default=25.0, gt=0)
    """A loader process that gives no batch for so long ends the run with its name."""
    remote: RemoteSettings = RemoteSettings()
    max_unreadable_fraction: float = Field(default=0.001, ge=0, le=1)
    """Training samples that cannot be read are replaced by others; more than this share of the
    samples seen (or of one epoch) ends the run."""
    crop: Literal["inception", "plain"] = "inception"
    """inception: a box of random area and aspect (see below). plain: the short side resized to the
    image size, then a crop that may stick out by 4 px, filled by reflection; DeiT-III on 21k."""
    crop_area: tuple[float, float] = Field(default=(0.05, 1.0), strict=False)
    """Area share of the random crop: 5-100 %, the inception crop of the ViT paper's code."""
    crop_aspect: tuple[float, float] = Field(default=(3 / 4, 4 / 3), strict=False)
    """Least and largest ratio of the random crop's sides."""
    horizontal_flip: bool = True
    """Mirror every second training image, at random."""
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    """Filter of every resize."""
    antialias: bool = False
    """False as in tf.image.resize, which the ViT and AugReg recipes used."""
    augment: AugmentSettings = AugmentSettings()
    mixing: MixingSettings | None = None
    eval_resize: Literal["squash", "center_crop"] = "squash"
    """squash: whole image to a square (ViT paper's code). center_crop: short side, then centre."""
    eval_crop_fraction: float = Field(default=0.875, gt=0, le=1)
    """center_crop only: image size divided by the resized short side; 224/256 = 0.875."""
    mean: tuple[float, float, float] = Field(default=(0.5, 0.5, 0.5), strict=False)
    """Subtracted from red, green and blue, each in [0, 1], before the division by `std`."""
    std: tuple[float, float, float] = Field(default=(0.5, 0.5, 0.5), strict=False)
    """0.5 / 0.5 maps pixels to [-1, 1], as the ViT paper's code does; DeiT uses ImageNet's."""


def remote_problems(data: DataSettings) -> Iterator[tuple[str, str]]:
    """URLs that are not read, and patience that would be called a hanging worker."""
    paths = [("data.path", data.path), *(("data.mixture", part.path) for part in data.mixture)]
    for key, path in paths:
        problem = url_problem(path) if is_url(path) else None
        if problem is not None:
            yield (key, problem)
    if data.remote.patience_s >= data.timeout_s and any(is_url(path) for _, path in paths):
        yield (
            "data.remote.patience_s",
            f"{data.remote.patience_s:g} s: must stay below data.timeout_s ({data.timeout_s:g} s), "
            "after which a worker counts as hanging",
        )


def augment_problems(data: DataSettings) -> Iterator[tuple[str, str]]:
    """Settings of augmentations that exclude each other or do nothing."""
    augment, mixing = data.augment, data.mixing
    if data.crop == "plain":
        for name in ("crop_area", "crop_aspect"):
            if getattr(data, name) != DataSettings.model_fields[name].default:
                yield (f"data.{name}", "has no effect on data.crop=plain; remove it")
    if mixing is not None and mixing.mixup_alpha is None and mixing.cutmix_alpha is None:
        yield ("data.mixing", "mixes nothing; give mixup_alpha or cutmix_alpha, or set it to null")
    key, policy = "data.augment", augment.randaugment
    if augment.three_augment and policy is not None:
        yield (f"{key}.three_augment", "replaces RandAugment; remove one of the two")
    if augment.three_augment and augment.color_jitter is not None:
        yield (f"{key}.color_jitter", "3-Augment brings its own of 0.3; remove one of the two")
    if policy is not None and policy.policy == "augreg" and policy.magnitude_std:
        yield (f"{key}.randaugment.magnitude_std", "is for policy timm; set it to 0")
    if policy is not None and policy.policy == "timm" and policy.magnitude > 10:
        yield (f"{key}.randaugment.magnitude", f"{policy.magnitude}: policy timm ends at 10")
    if augment.erasing is not None:
        for name, (low, high), bound in (
            ("area", augment.erasing.area, 1.0),
            ("aspect", augment.erasing.aspect, math.inf),
        ):
            if not 0 < low <= high <= bound:
                text = f"({low}, {high}) is not an increasing pair above 0, at most {bound}"
                yield (f"{key}.erasing.{name}", text)
