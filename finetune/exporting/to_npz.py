"""Export under Google's names: one .npz of vision_transformer or big_vision.

Leaves out: the names and shapes (`names.google`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from finetune.exporting.format import Format, logits_read_back, write_description
from finetune.loading.loaded_model import LoadedModel
from vitscale.models.weights.names.google import written

WEIGHTS_NAME = "model.npz"


class NpzFormat(Format):
    library = hub_library = "vitscale"

    def problems(self, loaded: LoadedModel) -> Iterator[str]:
        settings: Any = loaded.settings
        if settings.name != "vit":
            yield f"a model of the family {settings.name}"
            return
        unnamed = [ours for ours, theirs in _written(loaded).items() if theirs is None]
        if unnamed:
            yield f"tensors without a name there: {', '.join(sorted(unnamed)[:3])}"
        if settings.pool not in ("cls", "gap"):
            yield f"pool={settings.pool}"
        if settings.mlp != "gelu":
            yield f"mlp={settings.mlp}"
        if settings.pool == "gap" and settings.class_token:
            yield "a class token that no head reads"

    def notes(self, loaded: LoadedModel) -> Iterator[str]:
        if getattr(loaded.settings, "gelu", "tanh") == "erf":
            yield "**The model has GELU with erf; Google's code computes it with tanh.**"

    def write(self, loaded: LoadedModel, folder: Path) -> None:
        arrays = google_arrays(loaded)
        # Sorted, so that equal weights give equal bytes.
        np.savez(folder / WEIGHTS_NAME, **{name: arrays[name] for name in sorted(arrays)})  # type: ignore[arg-type]  # names are no options
        write_description(loaded, folder)

    def logits(
        self, loaded: LoadedModel, folder: Path, images_B3HW: torch.Tensor
    ) -> torch.Tensor | None:
        return logits_read_back(loaded, folder / WEIGHTS_NAME, images_B3HW)

    def usage(self, loaded: LoadedModel) -> str:
        return 'import numpy\nweights = dict(numpy.load("FOLDER/model.npz"))'


def google_arrays(loaded: LoadedModel) -> dict[str, np.ndarray]:
    """The weights as Google's code names and shapes them; without those that it has no name for."""
    named = filter(None, _written(loaded).values())
    return {name: np.ascontiguousarray(tensor.float().numpy()) for name, tensor in named}


def _written(loaded: LoadedModel) -> dict[str, tuple[str, torch.Tensor] | None]:
    arch: Any = loaded.arch
    return written(
        loaded.network.state_dict(),
        num_heads=arch.num_heads,
        # It does not add a position to the class token; vision_transformer does.
        is_big_vision=not arch.class_position,
    )
