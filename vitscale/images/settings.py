"""Settings of `data.augment`: augmentation of one image after crop and flip. Needs no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vitscale.config.section import Section


class RandAugmentSettings(Section):
    """Random operations per image (Cubuk et al. 2020); null: none."""

    num_ops: int = Field(default=2, gt=0, le=16)
    """Operations drawn per image."""
    magnitude: float = Field(default=10.0, ge=0, le=20)
    """Strength of the operations, on the scale of `policy`."""
    policy: Literal["augreg", "timm"] = "augreg"
    """augreg: big_vision's; magnitude 0 is not the identity. timm: rand-mM-mstdS-inc1, DeiT's."""
    magnitude_std: float = Field(default=0.0, ge=0)
    """Policy timm only; 0.5 in DeiT."""
    fill: Literal["gray", "mean"] = "gray"
    """Policy timm only: what rotation, shear and translation uncover. gray: 128. mean: the colour
    of `data.mean`, as timm's training does (DeiT)."""
    interpolation: Literal["random", "bilinear", "bicubic"] = "random"
    """Policy timm only: of rotation, shear and translation. random: bilinear or bicubic, drawn for
    each. timm takes that of the resize; DeiT bicubic."""


class ErasingSettings(Section):
    """Random erasing (Zhong et al. 2020); null: none."""

    probability: float = Field(gt=0, le=1)
    """Share of images with an erased rectangle."""
    mode: Literal["const", "rand", "pixel"] = "const"
    """const: the mean colour. rand: one random colour. pixel: normal noise, as in DeiT."""


class AugmentSettings(Section):
    """Applied after crop and flip, in this order."""

    randaugment: RandAugmentSettings | None = None
    three_augment: bool = False
    """DeiT III: grayscale, solarize or blur, then a colour jitter of 0.3."""
    erasing: ErasingSettings | None = None
