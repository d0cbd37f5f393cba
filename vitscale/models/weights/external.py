"""Hold external weights: tensors under our names, and what their source says of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

NOT_STATED = (0, 0)


@dataclass(frozen=True, kw_only=True)
class ExternalWeights:
    """Tensors in fp32 under our names, heads included, and what their source says of the model."""

    weights: dict[str, torch.Tensor]
    grid: tuple[int, int] = NOT_STATED
    """(rows, columns) of the position embedding; (1, 1) where there is none."""
    format: str = ""
    """In words: whose names the tensors had."""
    known: Mapping[str, Any] = field(default_factory=dict)
    """Values of `model` that shapes do not show, such as the form of GELU."""
    preprocessing: Mapping[str, Any] = field(default_factory=dict)
    """Values of the evaluation's preprocessing, named as in `data`."""
    assumed: bool = True
    """Whether `known` and `preprocessing` are defaults of the format, not read from its source."""
    classes: tuple[str, ...] | None = None
    """Name of each class by label, where the source has them."""
    left_out: tuple[str, ...] = ()
    """Names of tensors that no model here has use for, such as DINO's training heads."""
