"""Export for timm: weights under its names, and a config.json that says how to build the model.

transformers' Auto classes read the same folder. Source: timm, `models/_hub.py`.
Leaves out: which function of timm builds a model (`timm_architectures`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from finetune.exporting.format import Format, save_weights, weights_of
from finetune.loading.loaded_model import LoadedModel
from vitscale.distributed.atomic_files import write_json
from vitscale.evaluation.models.preprocessing import Preprocessing
from vitscale.images.size import rows_and_columns
from vitscale.models.weights.timm_architectures import (
    architecture_problems,
    timm_architecture,
    timm_weights,
)
from vitscale.models.weights.timm_folders import read_timm_folder

WEIGHTS_NAME, CONFIG_NAME = "model.safetensors", "config.json"
# Pillow's name of the filter that averages areas.
INTERPOLATIONS = {"bilinear": "bilinear", "bicubic": "bicubic", "area": "box"}


class TimmFormat(Format):
    library = "timm, and transformers' Auto classes"
    hub_library = "timm"

    def problems(self, loaded: LoadedModel) -> Iterator[str]:
        yield from architecture_problems(loaded.settings, loaded.arch)

    def write(self, loaded: LoadedModel, folder: Path) -> None:
        weights = timm_weights(weights_of(loaded), loaded.arch)
        save_weights(weights, folder / WEIGHTS_NAME)
        write_json(folder / CONFIG_NAME, _config(loaded))

    def logits(
        self, loaded: LoadedModel, folder: Path, images_B3HW: torch.Tensor
    ) -> torch.Tensor | None:
        found: torch.Tensor = read_timm_folder(folder)(images_B3HW)
        return found

    def usage(self, loaded: LoadedModel) -> str:
        return (
            "import timm\n"
            'model = timm.create_model("local-dir:FOLDER", pretrained=True).eval()\n'
            "transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))"
        )

    def notes(self, loaded: LoadedModel) -> Iterator[str]:
        yield (
            "**Without `pretrained=True` timm builds the model with random weights, without a "
            "warning.**"
        )


def timm_preprocessing(preprocessing: Preprocessing) -> dict[str, Any]:
    """In the words of timm's `pretrained_cfg`."""
    squash = preprocessing.eval_resize == "squash"
    return {
        "mean": list(preprocessing.mean),
        "std": list(preprocessing.std),
        "interpolation": INTERPOLATIONS[preprocessing.eval_interpolation],
        "crop_pct": 1.0 if squash else preprocessing.eval_crop_fraction,
        "crop_mode": "squash" if squash else "center",
    }


def _config(loaded: LoadedModel) -> dict[str, Any]:
    built = timm_architecture(loaded.settings, loaded.arch)
    config: dict[str, Any] = {
        "architecture": built.name,
        "num_classes": loaded.num_classes,
        "num_features": loaded.arch.feature_width,
        "model_args": built.arguments,
        "pretrained_cfg": {
            "input_size": [3, *rows_and_columns(loaded.preprocessing.image_size)],
            "fixed_input_size": built.fixed_input_size,
            "num_classes": loaded.num_classes,
            "first_conv": built.first_conv,
            "classifier": built.classifier,
            **timm_preprocessing(loaded.preprocessing),
        },
    }
    if loaded.classes is not None:
        config["label_names"] = list(loaded.classes)
    return config
