"""Export for timm: weights under its names, and a config.json that says how to build the model.

transformers' Auto classes read the same folder. Source: timm, `models/_hub.py`.
"""

from __future__ import annotations

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
from vitscale.models.weights.timm_folders import NORM_EPS, read_timm_folder

WEIGHTS_NAME, CONFIG_NAME = "model.safetensors", "config.json"
POOLS = {"cls": "token", "gap": "avg", "map": "map"}
# Pillow's name of the filter that averages areas.
INTERPOLATIONS = {"bilinear": "bilinear", "bicubic": "bicubic", "area": "box"}


class TimmFormat(Format):
    library = "timm, and transformers' Auto classes"

    def problems(self, loaded: LoadedModel) -> Iterator[str]:
        settings = loaded.settings
        if not isinstance(settings, ViTSettings):
            yield f"a model of the family {settings.name}"
            return
        if settings.pool not in POOLS:
            yield f"pool={settings.pool}"
        if settings.mlp != "gelu":
            yield f"mlp={settings.mlp}"
        if settings.representation_layer:
            yield "a representation layer"
        if settings.layer_norm_eps != NORM_EPS:
            yield f"layer_norm_eps {settings.layer_norm_eps:g} (timm has {NORM_EPS:g})"
        arch: Any = loaded.arch
        if arch.attention_width != arch.width:
            yield "attention heads of a width of their own"

    def write(self, loaded: LoadedModel, folder: Path) -> None:
        save_file(weights_of(loaded), folder / WEIGHTS_NAME, metadata={"format": "pt"})
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
    arch: Any = loaded.arch
    settings: Any = loaded.settings
    size = loaded.preprocessing.image_size
    distilled = arch.distillation_token
    config: dict[str, Any] = {
        # The function that builds it; the arguments replace all of its sizes.
        "architecture": "deit_base_distilled_patch16_224" if distilled else "vit_base_patch16_224",
        "num_classes": loaded.num_classes,
        "num_features": arch.feature_width,
        "model_args": {
            "img_size": size,
            "patch_size": arch.patch_size,
            "embed_dim": arch.width,
            "depth": arch.depth,
            "num_heads": arch.num_heads,
            "mlp_ratio": arch.mlp_width / arch.width,
            "act_layer": "gelu_tanh" if settings.gelu == "tanh" else "gelu",
            "global_pool": POOLS[arch.pool],
            "class_token": arch.has_class_token,
            "reg_tokens": arch.num_registers,
            "no_embed_class": not arch.class_position,
            "init_values": settings.layer_scale,
            "fc_norm": arch.pool_norm,
            "final_norm": True,
        },
        "pretrained_cfg": {
            "input_size": [3, *rows_and_columns(size)],
            "fixed_input_size": True,
            "num_classes": loaded.num_classes,
            "first_conv": "patch_embed.proj",
            "classifier": ["head", "head_dist"] if distilled else "head",
            **timm_preprocessing(loaded.preprocessing),
        },
    }
    if loaded.classes is not None:
        config["label_names"] = list(loaded.classes)
    return config
