"""Read a folder of timm: config.json with `architecture`, and weights.

Owns: what config.json says, in our settings' names. The architecture is looked up in timm, whose
models are built without memory for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from vitscale.config.errors import UserError, nearest
from vitscale.models.weights.folders.folder import CONFIG, Folder, labels_in_order, read_weights
from vitscale.models.weights.names.timm import from_pytorch

POOLS = {"token": "cls", "avg": "gap", "map": "map"}
# Of timm.data.create_transform; others resize in a way that the evaluations here do not.
CROPS = {"center": "center_crop", "squash": "squash"}
FILTERS = ("bilinear", "bicubic")
# timm.data.resolve_data_config, where pretrained_cfg leaves it out.
DEFAULTS = {
    "mean": (0.485, 0.456, 0.406),
    "std": (0.229, 0.224, 0.225),
    "interpolation": "bicubic",
    "crop_pct": 0.875,
    "crop_mode": "center",
}


def read_timm_folder(folder: Path, config: Mapping[str, Any]) -> Folder:
    """Raises UserError where the model is not a plain Vision Transformer, or not timm's."""
    where = str(folder / CONFIG)
    model = _without_memory(config, where=where)
    weights, left_out = from_pytorch(read_weights(folder))
    described: Any = config.get("pretrained_cfg") or {}
    names = config.get("label_names") or described.get("label_names")
    return Folder(
        weights=weights,
        format=f"timm's {config['architecture']}",
        known=_known(model, where=where),
        preprocessing=_preprocessing({**DEFAULTS, **described}, where=where),
        classes=_descriptions(config) or labels_in_order(names),
        grid=(int(model.patch_embed.grid_size[0]), int(model.patch_embed.grid_size[1])),
        left_out=left_out,
    )


def _without_memory(config: Mapping[str, Any], *, where: str) -> VisionTransformer:
    """The model that timm would build, on the meta device."""
    name = config["architecture"]
    if not isinstance(name, str) or not timm.is_model(name):
        close = nearest(str(name), timm.list_models())
        raise UserError(f"timm has no model {name!r}", where=where, allowed=close)
    arguments = config.get("model_args") or {}
    # Of the model alone: timm's factory also takes paths of files to load.
    unknown = sorted(set(arguments) - set(inspect.signature(VisionTransformer).parameters))
    if unknown:
        what = f"model_args {unknown[0]!r} is no option of a Vision Transformer"
        raise UserError(what, where=where, next_step="remove it")
    try:
        with torch.device("meta"):
            # Without classes the rest is the same, and classes are counted in the weights.
            model = timm.create_model(name, pretrained=False, **{**arguments, "num_classes": 0})
    except (TypeError, ValueError, RuntimeError, AssertionError, KeyError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        what = f"timm does not build {name} from it ({reason})"
        raise UserError(what, where=where) from None
    if not isinstance(model, VisionTransformer):
        raise UserError(
            f"{name} is a {type(model).__name__}, which is no plain Vision Transformer",
            where=where,
            allowed="timm's ViT and DeiT models, DINOv2 included",
        )
    return model


def _known(model: VisionTransformer, *, where: str) -> dict[str, Any]:
    block: Any = model.blocks[0]
    if model.global_pool not in POOLS:
        what = f"global_pool {model.global_pool!r} is no pooling of the models here"
        raise UserError(what, where=where, allowed=", ".join(POOLS))
    known: dict[str, Any] = {
        "num_heads": int(block.attn.num_heads),
        "layer_norm_eps": float(block.norm1.eps),
        "pool": POOLS[model.global_pool],
    }
    activation = block.mlp.act
    if isinstance(activation, nn.GELU):
        known["gelu"] = "tanh" if activation.approximate == "tanh" else "erf"
    elif type(activation).__name__ == "GELUTanh":
        known["gelu"] = "tanh"
    elif not isinstance(activation, nn.SiLU):  # of SwiGLU, which shapes show
        what = f"{type(activation).__name__} is no activation of the models here"
        raise UserError(what, where=where, allowed="GELU, with erf or tanh")
    return known


def _preprocessing(config: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    crop, interpolation = config["crop_mode"], config["interpolation"]
    if crop not in CROPS:
        raise UserError(f"unknown crop_mode {crop!r}", where=where, allowed=", ".join(CROPS))
    if interpolation not in FILTERS:
        what = f"unknown interpolation {interpolation!r}"
        raise UserError(what, where=where, allowed=", ".join(FILTERS))
    try:
        found = {
            "mean": tuple(float(value) for value in config["mean"]),
            "std": tuple(float(value) for value in config["std"]),
            "eval_resize": CROPS[crop],
            "eval_interpolation": interpolation,
        }
        share = float(config["crop_pct"])
    except (TypeError, ValueError) as error:
        raise UserError(f"pretrained_cfg: {error}", where=where) from None
    if crop == "center":
        found["eval_crop_fraction"] = share
    return found


def _descriptions(config: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Words instead of synset ids, where the folder has both."""
    names, described = config.get("label_names"), config.get("label_descriptions")
    if isinstance(names, list) and isinstance(described, dict):
        return tuple(str(described.get(name, name)) for name in names)
    return None
