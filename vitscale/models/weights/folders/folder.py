"""What a folder of weights with a config.json says of its model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vitscale.config.errors import UserError
from vitscale.models.weights.files.tensors import read_safetensors, read_torch_file

CONFIG = "config.json"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")


@dataclass(frozen=True, kw_only=True)
class Folder:
    """Weights under our names, and what the folder says of the model."""

    weights: dict[str, torch.Tensor]
    format: str
    """In words."""
    known: Mapping[str, Any]
    """Values of `model` that shapes do not show."""
    preprocessing: Mapping[str, Any]
    """Values of the evaluation's preprocessing, named as in `data`."""
    classes: tuple[str, ...] | None
    """Name of each class by label."""
    grid: tuple[int, int] | None
    """(rows, columns) of the position embedding."""
    left_out: list[str]
    """Names of tensors that are not read."""


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder under their own names. Raises UserError, and OSError."""
    for name in WEIGHTS:
        path = folder / name
        if not path.is_file():
            continue
        return read_torch_file(path) if name.endswith(".bin") else read_safetensors(path)
    raise UserError(
        f"has {CONFIG}, but no weights",
        where=str(folder),
        allowed=", ".join(WEIGHTS),
        next_step="download the whole folder",
    )


def labels_in_order(names: Any) -> tuple[str, ...] | None:
    """Names by label, of a list or an object; None for placeholders (LABEL_0) and for gaps."""
    if isinstance(names, list):
        names = {str(label): name for label, name in enumerate(names)}
    if not isinstance(names, dict) or set(names) != {str(label) for label in range(len(names))}:
        return None
    found = tuple(str(names[str(label)]) for label in range(len(names)))
    return None if found == tuple(f"LABEL_{label}" for label in range(len(names))) else found
