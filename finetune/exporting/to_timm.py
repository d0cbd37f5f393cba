"""Export for timm: weights under its names, and a config.json that says how to build the model.

transformers' Auto classes read the same folder. Source: timm, `models/_hub.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from finetune.exporting.format import Format, save_weights, weights_of
from finetune.loading.loaded_model import LoadedModel
from vitscale.distributed.atomic_files import write_json
from vitscale.evaluation.models.preprocessing import Preprocessing
from vitscale.models.timm_model import built_by_timm, pretrained_config
from vitscale.models.timm_settings import TimmSettings

WEIGHTS_NAME, CONFIG_NAME = "model.safetensors", "config.json"
# Pillow's name of the filter that averages areas.
INTERPOLATIONS = {"bilinear": "bilinear", "bicubic": "bicubic", "area": "box"}
# Of timm's layer norms; it has no option for another.
NORM_EPS = 1e-6
POOLS = {"cls": "token", "gap": "avg", "map": "map"}


class TimmFormat(Format):
    library = "timm, and transformers' Auto classes"
    hub_library = "timm"

    def problems(self, loaded: LoadedModel) -> Iterator[str]:
        settings: Any = loaded.settings
        arch: Any = loaded.arch
        if isinstance(settings, TimmSettings):
            return
        if settings.pool not in POOLS:
            yield f"pool={settings.pool}"
        if settings.representation_layer:
            yield "a representation layer"
        if settings.layer_norm_eps != NORM_EPS:
            yield f"layer_norm_eps {settings.layer_norm_eps:g} (timm has {NORM_EPS:g})"
        if arch.attention_width != arch.width:
            yield "attention heads of a width of their own"
        if settings.distillation_token and settings.mlp != "gelu":
            yield f"a distillation token beside mlp={settings.mlp}"

    def write(self, loaded: LoadedModel, folder: Path) -> None:
        save_weights(weights_of(loaded), folder / WEIGHTS_NAME)
        write_json(folder / CONFIG_NAME, _config(loaded))

    def logits(
        self, loaded: LoadedModel, folder: Path, images_B3HW: torch.Tensor
    ) -> torch.Tensor | None:
        found: torch.Tensor = built_by_timm(folder)(images_B3HW)
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
    built = _function(loaded.settings, loaded.arch)
    config: dict[str, Any] = {
        "architecture": built.name,
        "num_classes": loaded.num_classes,
        "num_features": loaded.network.num_features,
        "model_args": built.arguments,
        "pretrained_cfg": {
            "input_size": [3, *(2 * [loaded.preprocessing.image_size])],
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


@dataclass(frozen=True, kw_only=True)
class _Function:
    """How `timm.create_model` builds a model."""

    name: str
    arguments: dict[str, Any]
    first_conv: str
    classifier: str | list[str]
    fixed_input_size: bool = True
    """Whether the model is built for one image size."""


def _function(settings: Any, arch: Any) -> _Function:
    if isinstance(settings, TimmSettings):
        config: Any = pretrained_config(settings.model)
        size = {"img_size": arch.image_size} if config.fixed_input_size else {}
        return _Function(
            name=settings.model.partition(".")[0],
            arguments={**size, **settings.arguments},
            first_conv=config.first_conv,
            classifier=config.classifier,
            fixed_input_size=config.fixed_input_size,
        )
    is_gated = arch.mlp == "swiglu"
    arguments: dict[str, Any] = {
        "img_size": arch.image_size,
        "patch_size": arch.patch_size,
        "embed_dim": arch.width,
        "depth": arch.depth,
        "num_heads": arch.num_heads,
        # timm counts gates as hidden channels.
        "mlp_ratio": (2 if is_gated else 1) * arch.mlp_ratio,
        "act_layer": "silu" if is_gated else "gelu_tanh" if settings.gelu == "tanh" else "gelu",
        "global_pool": POOLS[arch.pool],
        "class_token": arch.has_class_token,
        "reg_tokens": arch.num_registers,
        "no_embed_class": not arch.class_position,
        "init_values": settings.layer_scale,
        "fc_norm": arch.pool_norm,
        "final_norm": True,
    }
    # The functions' own sizes are replaced by the arguments.
    name = "vit_base_patch16_224"
    if arch.distillation_token:
        name = "deit_base_distilled_patch16_224"
    elif is_gated:
        name = "vit_giant_patch14_dinov2"
    return _Function(
        name=name,
        arguments=arguments,
        first_conv="patch_embed.proj",
        classifier=["head", "head_dist"] if arch.distillation_token else "head",
    )
