"""Folders of timm: config.json with `architecture`, and weights.

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

from vitscale.config.errors import UserError
from vitscale.models.timm_model import pretrained_config
from vitscale.models.weights.files import CONFIG, NOT_STATED, Weights, labels_in_order, read_folder
from vitscale.models.weights.huggingface import IMAGENET
from vitscale.models.weights.names import from_pytorch

# SiLU is of SwiGLU, which shapes show.
ACTIVATIONS = {"none": "erf", "tanh": "tanh", "GELUTanh": "tanh", "SiLU": None}
POOLS = {"token": "cls", "avg": "gap", "map": "map"}
# Of timm.data.create_transform; others resize in a way that the evaluations here do not.
CROPS = {"center": "center_crop", "squash": "squash"}
FILTERS = ("bilinear", "bicubic")
# timm.data.resolve_data_config, where pretrained_cfg leaves it out.
DEFAULTS = {**IMAGENET, "interpolation": "bicubic", "crop_pct": 0.875, "crop_mode": "center"}


def read_timm_folder(folder: Path, config: Mapping[str, Any], *, as_timm: bool) -> Weights:
    """Weights of the family vit, or with `as_timm` and for other models of the family timm.

    Raises UserError where timm does not know the model.
    """
    where, name = str(folder / CONFIG), str(config["architecture"])
    described: Any = config.get("pretrained_cfg") or {}
    arguments = dict(config.get("model_args") or {})
    tensors, grid = read_folder(folder), NOT_STATED
    left_out: list[str] = []
    published = pretrained_config(name, where=where)
    preprocessing = timm_preprocessing({**DEFAULTS, **described}, where=where)
    model = None if as_timm else _plain_transformer(name, arguments)
    if model is None:
        size = described.get("input_size") or published.input_size
        size = arguments.pop("img_size", None) or size
        arguments.pop("num_classes", None)  # counted in the weights
        size = size if isinstance(size, int) else size[-1]
        known = {"name": "timm", "model": name, "image_size": size, "arguments": arguments}
    else:
        known, grid = _known(model), model.patch_embed.grid_size
        tensors, left_out = from_pytorch(tensors)
    names = config.get("label_names") or described.get("label_names")
    words = config.get("label_descriptions")
    if isinstance(names, list) and isinstance(words, dict):  # instead of synset ids
        names = [words.get(each, each) for each in names]
    return Weights(
        tensors=tensors,
        format=f"timm's {name}",
        known=known,
        preprocessing=preprocessing,
        classes=labels_in_order(names),
        grid=grid,
        assumed=() if described else preprocessing,
        left_out=tuple(left_out),
    )


def _plain_transformer(name: str, arguments: Mapping[str, Any]) -> VisionTransformer | None:
    """The model that timm would build, without memory; None if it is not in the family vit."""
    # Of the model alone: timm's factory also takes paths of files to load.
    if not set(arguments) <= set(inspect.signature(VisionTransformer).parameters):
        return None
    try:
        with torch.device("meta"):
            # Without classes the rest is the same, and classes are counted in the weights.
            model: Any = timm.create_model(name, **{**arguments, "num_classes": 0})
    except Exception:  # any kind; the family timm says why
        return None
    is_plain = isinstance(model, VisionTransformer) and isinstance(model.patch_embed, PatchEmbed)
    is_known = is_plain and model.global_pool in POOLS and _activation(model) in ACTIVATIONS
    return model if is_known else None


def _activation(model: VisionTransformer) -> str:
    block: Any = model.blocks[0]
    activation = block.mlp.act
    return str(getattr(activation, "approximate", type(activation).__name__))


def _known(model: VisionTransformer) -> dict[str, Any]:
    block: Any = model.blocks[0]
    known = {
        "num_heads": int(block.attn.num_heads),
        "layer_norm_eps": float(block.norm1.eps),
        "pool": POOLS[model.global_pool],
    }
    gelu = ACTIVATIONS[_activation(model)]
    return known | ({} if gelu is None else {"gelu": gelu})


def timm_preprocessing(config: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Read the preprocessing in `pretrained_cfg`, under our settings' names."""
    crop, interpolation = config["crop_mode"], config["interpolation"]
    for key, allowed in (("crop_mode", CROPS), ("interpolation", FILTERS)):
        if config[key] not in allowed:
            what = f"unknown {key} {config[key]!r}"
            raise UserError(what, where=where, allowed=", ".join(allowed))
    found = {
        "mean": tuple(map(float, config["mean"])),
        "std": tuple(map(float, config["std"])),
        "eval_resize": CROPS[crop],
        "eval_interpolation": interpolation,
    }
    return found | ({"eval_crop_fraction": float(config["crop_pct"])} if crop == "center" else {})
