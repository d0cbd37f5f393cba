"""Read exported weights as `init=` reads them."""

from __future__ import annotations

from pathlib import Path

import torch

from finetune.loading.loaded_model import LoadedModel
from vitscale.models.registry import MODELS
from vitscale.models.weights.reading import read_external_weights
from vitscale.models.weights.transfer import transfer_weights


def logits_read_back(loaded: LoadedModel, path: Path, images_B3HW: torch.Tensor) -> torch.Tensor:
    """What a model of the same settings with these weights makes of normalised images."""
    arch = loaded.arch
    external = read_external_weights(path, grid=arch.grid)
    network = MODELS[arch.name].load().build_model(loaded.settings, arch, seed=1).eval()
    transfer_weights(
        network,
        weights=external.weights,
        source_grid=arch.grid,
        target_grid=arch.grid,
        num_prefix_tokens=arch.num_prefix_tokens,
        convention="google",
        where=str(path),
        keep_head=True,
    )
    logits: torch.Tensor = network(images_B3HW)
    return logits
