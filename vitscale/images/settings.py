"""Settings of `data.augment`: augmentation of one image after crop and flip. Needs no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vitscale.config.section import Pair, Section

Fraction = Annotated[float, Field(ge=0, le=1)]


class RandAugmentSettings(Section):
    """Random operations per image (Cubuk et al. 2020); null: none."""

    num_ops: int = Field(default=2, gt=0, le=16)
    """Operations drawn per image."""
    magnitude: float = Field(default=10.0, ge=0, le=20)
    """Fraction of the operations, on the scale of `policy`."""
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


class Occasional(Section):
    """An operation on some of the images; null: on none."""

    probability: float = Field(gt=0, le=1)
    """Share of images that it changes."""


class JitterSettings(Occasional):
    """Random changes of colour, in random order, as torchvision's ColorJitter; null: none."""

    brightness: Fraction
    """Its factor is drawn from 1 - this to 1 + this. SimCLR 0.8; DINO, DINOv2, iBOT 0.4."""
    contrast: Fraction
    """Its factor is drawn from 1 - this to 1 + this. SimCLR 0.8; DINO, DINOv2, iBOT 0.4."""
    saturation: Fraction
    """Its factor is drawn from 1 - this to 1 + this. SimCLR 0.8; DINO, DINOv2, iBOT 0.2."""
    hue: float = Field(ge=0, le=0.5)
    """It is turned by at most this share of the colour circle, either way. SimCLR 0.2; DINO,
    DINOv2, iBOT 0.1."""


class BlurSettings(Occasional):
    """Gaussian blur of 9 x 9 pixels; null: none."""

    sigma: Pair = (0.1, 2.0)
    """Range of the standard deviation, in pixels."""


class ErasingSettings(Occasional):
    """Random erasing (Zhong et al. 2020); null: none."""

    mode: Literal["const", "rand", "pixel"] = "const"
    """const: the mean colour. rand: one random colour. pixel: normal noise, as in DeiT."""


class AugmentSettings(Section):
    """Applied after crop and flip, in this order."""

    randaugment: RandAugmentSettings | None = None
    three_augment: bool = False
    """DeiT III: grayscale, solarize or blur, then a colour jitter of 0.3."""
    jitter: JitterSettings | None = None
    grayscale: Occasional | None = None
    """The same grey in all three channels; null: in no image."""
    blur: BlurSettings | None = None
    solarize: Occasional | None = None
    """Levels from 128 on are inverted; null: in no image."""
    erasing: ErasingSettings | None = None
