"""Export what `init=` reads, with the settings as JSON: under our names (timm's), or Google's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from finetune.exporting.format import (
    Format,
    in_vitscale,
    save_weights,
    split,
    write_description,
)
from vitscale.evaluation.trained_model import TrainedModel, open_model
from vitscale.models.weights.google import NUMBERS, WRITE
from vitscale.models.weights.names import Tensors, numbered


class SafetensorsFormat(Format):
    """Weights under our names."""

    library = hub_library = "vitscale"

    def write(self, model: TrainedModel, folder: Path) -> None:
        save_weights(model.network.state_dict(), folder / "model.safetensors")
        write_description(model, folder)

    def logits(
        self, model: TrainedModel, folder: Path, images_B3SS: torch.Tensor
    ) -> torch.Tensor:
        logits: torch.Tensor = open_model(str(folder)).network(images_B3SS)
        return logits

    def usage(self, model: TrainedModel) -> str:
        return in_vitscale(model)


class NpzFormat(SafetensorsFormat):
    """Google's names: one .npz of vision_transformer or big_vision."""

    def unlike(self, model: TrainedModel) -> dict[str, bool]:
        arch: Any = model.arch
        if arch.name != "vit":
            return {f"a model of the family {arch.name}": True}

        _, unnamed = _google(model)
        # Google's models have a class token only where the head reads it.
        has_unread_token = arch.pool != "cls" and arch.has_class_token
        return {
            f"tensors without a name there: {', '.join(sorted(unnamed)[:3])}": bool(
                unnamed
            ),
            f"pool={arch.pool}": arch.pool == "cls_mean",
            f"mlp={arch.mlp}": arch.mlp != "gelu",
            "a class token that no head reads": has_unread_token,
        }

    def notes(self, model: TrainedModel) -> Iterator[str]:
        arch: Any = model.arch
        if arch.gelu == "erf":
            yield "**The model has GELU with erf; Google's code computes it with tanh.**"

    def write(self, model: TrainedModel, folder: Path) -> None:
        named, _ = _google(model)
        # Sorted, so that equal weights give equal bytes.
        arrays: Any = {
            name: np.ascontiguousarray(named[name].float().numpy())
            for name in sorted(named)
        }
        np.savez(folder / "model.npz", **arrays)
        write_description(model, folder)

    def usage(self, model: TrainedModel) -> str:
        weights = 'weights = dict(numpy.load("FOLDER/model.npz"))'
        return f"import numpy\n{weights}\n# or\n{in_vitscale(model)}"


def _google(model: TrainedModel) -> tuple[Tensors, list[str]]:
    """Tensors under Google's names, and our names of those that their code has no module for."""
    arch: Any = model.arch
    # It does not add a position to the class token, and has a pooling head (MAP).
    is_big_vision = not arch.has_class_position or arch.pool == "map"
    renamed: Tensors = {}
    unnamed = []
    for name, tensor in split(model.network.state_dict()).items():
        # Our representation layer and the head after it are one module.
        template = name.replace("head.0.", "pre_logits.").replace("head.2.", "head.")
        template, number = numbered(template)
        if template not in WRITE:
            unnamed.append(name)
            continue

        theirs, layout = WRITE[template]
        if is_big_vision:
            theirs = f"params/{theirs}"
        elif theirs == "pos_embedding":
            theirs = "Transformer/posembed_input/pos_embedding"
        elif number:
            for new, old in NUMBERS:
                theirs = theirs.replace(f"/{new}/", f"/{old}/")
        renamed[theirs.format(number)] = layout.write(tensor, arch.num_heads)
    return renamed, unnamed
