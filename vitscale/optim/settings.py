"""Settings of the `objective` and `optim` groups. Needs no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vitscale.config.section import Section


class ObjectiveSettings(Section):
    loss: Literal["softmax", "sigmoid"] = "softmax"
    """sigmoid: binary cross-entropy SUMMED over classes, averaged over the batch (ViT on 21k)."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """softmax only."""


class OptimSettings(Section):
    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = Field(gt=0)
    """Peak learning rate at the configured global batch; never scaled behind your back."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW scale (times the learning rate). On kernels only: no bias, norm, token, position."""
    betas: tuple[float, float] = Field(default=(0.9, 0.999), strict=False)
    eps: float = Field(default=1e-8, gt=0)
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """sgd only."""
    clip_norm: float | None = Field(default=None, gt=0)
    """Global gradient norm above which gradients are scaled down; null: never."""
