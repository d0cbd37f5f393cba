"""Read the weights beside a config.json, and the names of classes in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from vitscale.config.errors import UserError
from vitscale.models.weights.files import read_safetensors, read_torch_file

CONFIG = "config.json"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")


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
