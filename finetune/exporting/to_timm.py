"""Export for timm: weights under its names, and a config.json that says how to build the model.

transformers' Auto classes read the same folder. Source: timm, `models/_hub.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from finetune.exporting.format import Format, save_weights, weights_of
from vitscale.distributed.atomic_files import write_json
from vitscale.evaluation.inference import Preprocessing
from vitscale.evaluation.trained_model import TrainedModel
from vitscale.models.settings import TimmSettings
from vitscale.models.timm_model import built_by_timm, pretrained_config

WEIGHTS_NAME, CONFIG_NAME = "model.safetensors", "config.json"
# Pillow's name of the filter that averages areas.
INTERPOLATIONS = {"bilinear": "bilinear", "bicubic": "bicubic", "area": "box"}
# Of timm's layer norms; it has no option for another.
NORM_EPS = 1e-6
POOLS = {"cls": "token", "gap": "avg", "map": "map"}


class TimmFormat(Format):
    library = "timm, and transformers' Auto classes"
    hub_library = "timm"

    def problems(self, model: TrainedModel) -> Iterator[str]:
        settings: Any = model.settings
        arch: Any = model.arch
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

    def write(self, model: TrainedModel, folder: Path) -> None:
        save_weights(weights_of(model), folder / WEIGHTS_NAME)
        write_json(folder / CONFIG_NAME, _config(model))

    def logits(
        self, model: TrainedModel, folder: Path, images_B3SS: torch.Tensor
    ) -> torch.Tensor | None:
        found: torch.Tensor = built_by_timm(folder)(images_B3SS)
        return found

    def usage(self, model: TrainedModel) -> str:
        return (
            "import timm\n"
            'model = timm.create_model("local-dir:FOLDER", pretrained=True).eval()\n'
            "transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))"
        )

    def notes(self, model: TrainedModel) -> Iterator[str]:
        yield (
            "**Without `pretrained=True` timm builds the model with random weights, without a "
            "warning.**"
        )


def timm_preprocessing(preprocessing: Preprocessing) -> dict[str, Any]:
    """In the words of timm's `pretrained_cfg`."""
    squash = preprocessing.eval_resize == "squash"
    return {
        "input_size": [3, preprocessing.image_size, preprocessing.image_size],
        "mean": list(preprocessing.mean),
        "std": list(preprocessing.std),
        "interpolation": INTERPOLATIONS[preprocessing.eval_interpolation],
        "crop_pct": 1.0 if squash else preprocessing.eval_crop_fraction,
        "crop_mode": "squash" if squash else "center",
    }


def _config(model: TrainedModel) -> dict[str, Any]:
    settings, arch = model.settings, model.arch
    if isinstance(settings, TimmSettings):
        theirs: Any = pretrained_config(settings.model)
        size = {"img_size": arch.image_size} if theirs.fixed_input_size else {}
        name, arguments = settings.model.partition(".")[0], {**size, **settings.arguments}
        layers = {
            "fixed_input_size": theirs.fixed_input_size,
            "first_conv": theirs.first_conv,
            "classifier": theirs.classifier,
        }
    else:
        name, arguments = _vit(settings, arch)
        has_two = "deit" in name
        layers = {
            "fixed_input_size": True,
            "first_conv": "patch_embed.proj",
            "classifier": ["head", "head_dist"] if has_two else "head",
        }
    names = {} if model.classes is None else {"label_names": list(model.classes)}
    return {
        "architecture": name,
        "num_classes": model.num_classes,
        "num_features": model.network.num_features,
        "model_args": arguments,
        "pretrained_cfg": {
            "num_classes": model.num_classes,
            **layers,
            **timm_preprocessing(model.preprocessing),
        },
        **names,
    }


def _vit(settings: Any, arch: Any) -> tuple[str, dict[str, Any]]:
    """A function of timm, whose own sizes are replaced by the arguments."""
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
        "no_embed_class": not arch.has_class_position,
        "init_values": settings.layer_scale,
        "fc_norm": arch.pool_norm,
        "final_norm": True,
    }
    if arch.distillation_token:
        return "deit_base_distilled_patch16_224", arguments
    return "vit_giant_patch14_dinov2" if is_gated else "vit_base_patch16_224", arguments
