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
from timm.layers import PatchEmbed
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from vitscale.config.errors import UserError
from vitscale.models.timm_model import pretrained_config
from vitscale.models.weights.external import NOT_STATED, ExternalWeights
from vitscale.models.weights.folder import CONFIG, labels_in_order, read_weights
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


def read_timm_folder(folder: Path, config: Mapping[str, Any], *, as_timm: bool) -> ExternalWeights:
    """Weights of the family vit, or with `as_timm` and for other models of the family timm.

    Raises UserError where timm does not know the model.
    """
    where = str(folder / CONFIG)
    described: Any = config.get("pretrained_cfg") or {}
    names = config.get("label_names") or described.get("label_names")
    found = read_weights(folder)
    left_out: list[str] = []
    model = None if as_timm else _plain_transformer(config, where=where)
    if model is None:
        known, grid = _timm_settings(config, described), NOT_STATED
    else:
        rows, columns = model.patch_embed.grid_size
        grid = (int(rows), int(columns))
        known = _known(model, where=where)
        found, left_out = from_pytorch(found)
    return ExternalWeights(
        weights=found,
        format=f"timm's {config['architecture']}",
        known=known,
        preprocessing=timm_preprocessing({**DEFAULTS, **described}, where=where),
        classes=_descriptions(config) or labels_in_order(names),
        grid=grid,
        assumed=False,
        left_out=tuple(left_out),
    )


def _timm_settings(config: Mapping[str, Any], described: Mapping[str, Any]) -> dict[str, Any]:
    """Values of `model` with name=timm; `model.arguments` are checked as settings."""
    size = described.get("input_size") or pretrained_config(config["architecture"]).input_size
    arguments = dict(config.get("model_args") or {})
    return {
        "name": "timm",
        "model": config["architecture"],
        "image_size": arguments.pop("img_size", None) or size[-1],
        "arguments": arguments,
    }


def _plain_transformer(config: Mapping[str, Any], *, where: str) -> VisionTransformer | None:
    """The model that timm would build, without memory; None if it is of another family."""
    name, arguments = config["architecture"], config.get("model_args") or {}
    pretrained_config(str(name), where=where)
    # Of the model alone: timm's factory also takes paths of files to load.
    if not set(arguments) <= set(inspect.signature(VisionTransformer).parameters):
        return None
    try:
        with torch.device("meta"):
            # Without classes the rest is the same, and classes are counted in the weights.
            model: Any = timm.create_model(
                name, pretrained=False, **{**arguments, "num_classes": 0}
            )
    except (TypeError, ValueError, RuntimeError, AssertionError, KeyError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        what = f"timm does not build {name} from it ({reason})"
        raise UserError(what, where=where) from None
    is_plain = isinstance(model, VisionTransformer) and isinstance(model.patch_embed, PatchEmbed)
    return model if is_plain else None


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


def timm_preprocessing(config: Mapping[str, Any], *, where: str) -> dict[str, Any]:
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
