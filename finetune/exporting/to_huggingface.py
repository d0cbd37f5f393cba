"""Export for transformers: a ViT or DeiT folder that its Auto classes load.

Owns: config.json and preprocessor_config.json. Leaves out: names of tensors (`names.huggingface`).
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from finetune.exporting.format import Format, weights_of
from finetune.loading.loaded_model import LoadedModel
from vitscale.distributed.atomic_files import write_json
from vitscale.evaluation.models.preprocessing import Preprocessing
from vitscale.images.size import rows_and_columns
from vitscale.models.vit.settings import ViTSettings
from vitscale.models.weights.names.huggingface import to_huggingface

ACTIVATIONS = {"tanh": "gelu_pytorch_tanh", "erf": "gelu"}
# Pillow's numbers of filters; box averages areas.
FILTERS = {"bilinear": 2, "bicubic": 3, "area": 4}


class HuggingFaceFormat(Format):
    library = "transformers"

    def problems(self, loaded: LoadedModel) -> Iterator[str]:
        settings, arch = loaded.settings, loaded.arch
        if not isinstance(settings, ViTSettings):
            yield f"a model of the family {settings.name}"
            return
        if settings.pool != "cls":
            yield f"pool={settings.pool}"
        if settings.mlp != "gelu":
            yield f"mlp={settings.mlp}"
        if settings.representation_layer:
            yield "a representation layer"
        rows, columns = rows_and_columns(loaded.preprocessing.image_size)
        if rows != columns and loaded.preprocessing.eval_resize != "squash":
            yield f"a centre crop of {rows} x {columns} px"
        if settings.head_width not in (None, arch.feature_width // settings.numbers()["num_heads"]):
            yield "attention heads of a width of their own"
        if not loaded.num_classes:
            yield "no head"
        if settings.pool == "cls" and not settings.representation_layer:
            names = [name for name in _weights(loaded) if not name.startswith(_prefixes(loaded))]
            if names:
                yield f"tensors without a name there, such as {sorted(names)[0]}"

    def write(self, loaded: LoadedModel, folder: Path) -> None:
        save_file(_weights(loaded), folder / "model.safetensors", metadata={"format": "pt"})
        write_json(folder / "config.json", _config(loaded))
        write_json(folder / "preprocessor_config.json", _preprocessor(loaded.preprocessing))

    def logits(
        self, loaded: LoadedModel, folder: Path, images_B3HW: torch.Tensor
    ) -> torch.Tensor | None:
        if importlib.util.find_spec("transformers") is None:
            return None
        from transformers import AutoModelForImageClassification

        model: Any = AutoModelForImageClassification.from_pretrained(folder, local_files_only=True)
        found: torch.Tensor = model.eval()(pixel_values=images_B3HW).logits
        return found

    def usage(self, loaded: LoadedModel) -> str:
        return (
            "from transformers import AutoImageProcessor, AutoModelForImageClassification\n"
            'model = AutoModelForImageClassification.from_pretrained("FOLDER")\n'
            'processor = AutoImageProcessor.from_pretrained("FOLDER")'
        )


def _model_type(loaded: LoadedModel) -> str:
    return "deit" if getattr(loaded.settings, "distillation_token", False) else "vit"


def _prefixes(loaded: LoadedModel) -> tuple[str, ...]:
    if _model_type(loaded) == "deit":
        return ("deit.", "cls_classifier.", "distillation_classifier.")
    return ("vit.", "classifier.")


def _weights(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    """Under transformers' names. A class token without a position gets one of zeros."""
    weights = weights_of(loaded)
    rows, columns = loaded.arch.grid
    if weights["pos_embed"].shape[1] == rows * columns:
        none_11D = torch.zeros_like(weights["pos_embed"][:, :1])
        weights["pos_embed"] = torch.cat([none_11D, weights["pos_embed"]], dim=1)
    return to_huggingface(weights, _model_type(loaded))


def _config(loaded: LoadedModel) -> dict[str, Any]:
    arch: Any = loaded.arch
    settings: Any = loaded.settings
    distilled = _model_type(loaded) == "deit"
    names = loaded.classes or tuple(f"class {label}" for label in range(loaded.num_classes))
    return {
        "model_type": _model_type(loaded),
        "architectures": [
            "DeiTForImageClassificationWithTeacher" if distilled else "ViTForImageClassification"
        ],
        "hidden_size": arch.width,
        "num_hidden_layers": arch.depth,
        "num_attention_heads": arch.num_heads,
        "intermediate_size": arch.mlp_width,
        "image_size": list(rows_and_columns(loaded.preprocessing.image_size)),
        "patch_size": arch.patch_size,
        "num_channels": 3,
        "qkv_bias": True,
        "hidden_act": ACTIVATIONS[settings.gelu],
        # transformers' own default is 1e-12.
        "layer_norm_eps": settings.layer_norm_eps,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "id2label": {str(label): name for label, name in enumerate(names)},
        "label2id": {name: label for label, name in enumerate(names)},
    }


def _preprocessor(preprocessing: Preprocessing) -> dict[str, Any]:
    """ViTImageProcessor squashes; BitImageProcessor resizes the short side and crops."""
    rows, columns = rows_and_columns(preprocessing.image_size)
    sides = {"height": rows, "width": columns}
    size: dict[str, Any] = {
        "image_processor_type": "ViTImageProcessor",
        "size": sides,
    }
    if preprocessing.eval_resize != "squash":
        size = {
            "image_processor_type": "BitImageProcessor",
            "size": {"shortest_edge": math.floor(rows / preprocessing.eval_crop_fraction)},
            "do_center_crop": True,
            "crop_size": sides,
        }
    return size | {
        "do_resize": True,
        "resample": FILTERS[preprocessing.eval_interpolation],
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(preprocessing.mean),
        "image_std": list(preprocessing.std),
        # Without it grey and transparent images raise.
        "do_convert_rgb": True,
    }
