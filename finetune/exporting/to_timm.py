"""Export for timm: weights under its names, and a config.json that says how to build the model.

transformers' Auto classes read the same folder. Source: timm, `models/_hub.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from finetune.exporting.format import (
    PHOTO,
    Format,
    in_vitscale,
    save_weights,
    weights_of,
)
from vitscale.distributed.atomic_files import write_json
from vitscale.evaluation.trained_model import Preprocessing, TrainedModel
from vitscale.models.settings import TimmSettings
from vitscale.models.timm_model import built_by_timm, pretrained_config

# Pillow's name of the filter that averages areas.
INTERPOLATIONS = {"bilinear": "bilinear", "bicubic": "bicubic", "area": "box"}
# timm's layer norms have it, and no option for another.
NORM_EPS = 1e-6
POOLS = {"cls": "token", "gap": "avg", "map": "map"}


class TimmFormat(Format):
    library = hub_library = "timm"

    def unlike(self, model: TrainedModel) -> dict[str, bool]:
        arch: Any = model.arch
        if isinstance(arch, TimmSettings):
            return {}
        # Another epsilon would go unnoticed: the tensors fit, and the logits differ.
        eps = arch.layer_norm_eps
        return {
            f"pool={arch.pool}": arch.pool not in POOLS,
            "a representation layer": arch.representation_layer,
            f"layer_norm_eps {eps:g} (timm has {NORM_EPS:g})": eps != NORM_EPS,
            "attention heads of a width of their own": arch.attention_width
            != arch.width,
            f"a distillation token beside mlp={arch.mlp}": (
                arch.distillation_token and arch.mlp != "gelu"
            ),
        }

    def write(self, model: TrainedModel, folder: Path) -> None:
        save_weights(weights_of(model), folder / "model.safetensors")
        write_json(folder / "config.json", _config(model))

    def logits(
        self, model: TrainedModel, folder: Path, images_B3SS: torch.Tensor
    ) -> torch.Tensor:
        logits: torch.Tensor = built_by_timm(folder)(images_B3SS)
        return logits

    def usage(self, model: TrainedModel) -> str:
        best = "outputs.argmax().item()"
        if model.classes is not None:
            best = f'model.pretrained_cfg["label_names"][{best}]'
        elif not model.num_classes:
            best = "outputs"
        return (
            "import timm\nfrom PIL import Image, ImageOps\n"
            'model = timm.create_model("local-dir:FOLDER", pretrained=True).eval()\n'
            "transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))\n"
            f"{PHOTO}outputs = model(transform(image)[None])\nprint({best})\n"
            f"# or\n{in_vitscale(model)}"
        )

    def notes(self, model: TrainedModel) -> Iterator[str]:
        yield (
            "**Without `pretrained=True` timm builds the model with random weights, without a "
            "warning.**"
        )


def _config(model: TrainedModel) -> dict[str, Any]:
    arch: Any = model.arch
    # timm's own models keep their name; ours are one of its functions with other sizes.
    if isinstance(arch, TimmSettings):
        theirs: Any = pretrained_config(arch.model)
        name = arch.model.partition(".")[0]
        arguments = dict(arch.arguments)
        # Models without a fixed size refuse the argument.
        if theirs.fixed_input_size:
            arguments = {"img_size": arch.image_size, **arguments}
        layers = {
            key: getattr(theirs, key)
            for key in ("fixed_input_size", "first_conv", "classifier")
        }
    else:
        name, arguments = _vit(arch)
        layers = {
            "fixed_input_size": True,
            "first_conv": "patch_embed.proj",
            "classifier": ["head", "head_dist"] if arch.distillation_token else "head",
        }

    config = {
        "architecture": name,
        "num_classes": model.num_classes,
        "num_features": model.network.num_features,
        "model_args": arguments,
        # The first and last layer are named for those who replace them.
        "pretrained_cfg": {
            "num_classes": model.num_classes,
            **layers,
            **_preprocessing(model.preprocessing),
        },
    }
    if model.classes is not None:
        config["label_names"] = list(model.classes)
    return config


def _preprocessing(pixels: Preprocessing) -> dict[str, Any]:
    """Return the preprocessing in the form of timm's `pretrained_cfg`."""
    # A squash resizes to the final size, so timm must not crop.
    crop_fraction = pixels.eval_crop_fraction
    if pixels.eval_resize == "squash":
        crop_fraction = 1.0
    is_center = pixels.eval_resize.startswith("center_crop")
    return {
        "input_size": [3, pixels.image_size, pixels.image_size],
        "mean": list(pixels.mean),
        "std": list(pixels.std),
        "interpolation": INTERPOLATIONS[pixels.eval_interpolation],
        "crop_pct": crop_fraction,
        "crop_mode": "center" if is_center else "squash",
    }


def _vit(arch: Any) -> tuple[str, dict[str, Any]]:
    """Return a model function of timm, and the arguments that replace its sizes."""
    # timm has SwiGLU in DINOv2's largest model alone, and counts gates as hidden channels.
    name = "vit_base_patch16_224"
    mlp_ratio = arch.mlp_ratio
    activation = "gelu_tanh" if arch.gelu == "tanh" else "gelu"
    if arch.mlp == "swiglu":
        name = "vit_giant_patch14_dinov2"
        mlp_ratio = 2 * arch.mlp_ratio
        activation = "silu"
    if arch.distillation_token:
        name = "deit_base_distilled_patch16_224"

    # timm's function begins with the sizes of its name, and these replace all of them.
    return name, {
        "img_size": arch.image_size,
        "patch_size": arch.patch_size,
        "embed_dim": arch.width,
        "depth": arch.depth,
        "num_heads": arch.num_heads,
        "mlp_ratio": mlp_ratio,
        "act_layer": activation,
        "global_pool": POOLS[arch.pool],
        "class_token": arch.has_class_token,
        "reg_tokens": arch.num_registers,
        "no_embed_class": not arch.has_class_position,
        "init_values": arch.layer_scale,
        "fc_norm": arch.pool_norm,
        "final_norm": True,
    }
