"""Weights of timm: folders, config.json with `architecture` beside weights, and its checkpoints.

Owns: what they say of the model, in our settings' names. The architecture is looked up in timm,
whose models are built without memory for it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import timm
import torch
from timm.layers import GluMlp, PatchEmbed
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

from vitscale.config.errors import UserError
from vitscale.models.registry import MODELS
from vitscale.models.timm_model import pretrained_config
from vitscale.models.weights.files import CONFIG, Weights, labels_in_order, read_folder
from vitscale.models.weights.names import Tensors, from_pytorch, without_wrappers
from vitscale.models.weights.pixels import timm_preprocessing
from vitscale.models.weights.transfer import POSITIONS, inferred_model

# SiLU is of SwiGLU, which shapes show.
ACTIVATIONS = {"none": "erf", "tanh": "tanh", "GELUTanh": "tanh", "SiLU": None}
POOLS = {"token": "cls", "avg": "gap", "map": "map"}
# A class of ImageNet, whose words are easier to read and found again among its ids.
SYNSET = re.compile(r"n\d{8}")
# Of a command line of timm's train.py: what else decides how images are read.
PIXEL_ARGUMENTS = ("mean", "std", "interpolation", "crop_pct", "crop_mode", "img_size")


def read_timm_folder(
    folder: Path, config: Mapping[str, Any], *, as_timm: bool
) -> Weights:
    """Read a folder, as `timm_weights`.

    Raises UserError where timm does not know the model.
    """
    # Before timm 0.8 the keys of pretrained_cfg stood beside the architecture.
    described: Any = config.get("pretrained_cfg", config) or {}
    where, name = str(folder / CONFIG), str(config["architecture"])
    names = (
        config.get("label_names")
        or described.get("label_names")
        or described.get("labels")
    )
    words = config.get("label_descriptions") or described.get("label_descriptions")
    if isinstance(names, list) and isinstance(words, dict):
        names = [
            words.get(each, each) if SYNSET.fullmatch(str(each)) else each
            for each in names
        ]
    pixels = timm_preprocessing(described, where=where)
    found = timm_weights(
        read_folder(folder),
        name,
        arguments=config.get("model_args") or {},
        input_size=described.get("input_size"),
        as_timm=as_timm,
        where=where,
    )
    is_stated = "mean" in described and "std" in described
    return replace(
        found,
        preprocessing=pixels,
        classes=labels_in_order(names),
        assumed=() if is_stated else pixels,
    )


def read_timm_checkpoint(
    tensors: Tensors, arguments: Mapping[str, Any], *, as_timm: bool, where: str
) -> Weights:
    """Read what timm's train.py or DeiT's main.py saved: `arguments` of its command line, which say
    how the model was built and how its images were made."""
    name, size = arguments["model"], arguments.get("input_size")
    # In DeiT one number, which builds the model too.
    own = {"img_size": size} if isinstance(size, int) else {}
    pool = arguments.get("gp")
    own |= {} if pool is None else {"global_pool": pool}
    own |= arguments.get("model_kwargs") or {}

    pixels = {key: arguments.get(key) for key in PIXEL_ARGUMENTS}
    pixels |= {"img_size": size} if isinstance(size, int) else {"input_size": size}
    pixels["crop_pct"] = pixels["crop_pct"] or arguments.get("eval_crop_ratio")
    config = asdict(pretrained_config(name, where=where))
    found = timm_weights(
        tensors, name, arguments=own, input_size=size, as_timm=as_timm, where=where
    )
    return replace(
        found,
        preprocessing=timm_preprocessing(config, where=where, arguments=pixels),
        assumed=(),
        independent=bool(arguments.get("bce_loss")),
    )


def timm_weights(
    tensors: Tensors,
    name: str,
    *,
    arguments: Mapping[str, Any],
    input_size: Any,
    as_timm: bool,
    where: str,
) -> Weights:
    """Weights of the family vit, or with `as_timm` and for other models of the family timm.

    arguments: of timm.create_model. input_size: pixels, as in `pretrained_cfg`.
    Raises UserError where timm does not know the model.
    """
    published, arguments = pretrained_config(name, where=where), dict(arguments)
    origin = f"timm's {name}"
    model = None if as_timm else _plain_transformer(name, arguments)
    if model is not None:
        tensors, left_out = from_pytorch(tensors)
        return Weights(
            tensors=tensors,
            format=origin,
            known=_known(model),
            grid=model.patch_embed.grid_size,
            left_out=tuple(left_out),
            positions="timm",
        )
    size = arguments.pop("img_size", None) or input_size or published.input_size
    arguments.pop("num_classes", None)  # counted in the weights
    size = size if isinstance(size, int) else size[-1]
    known = {"name": "timm", "model": name, "image_size": size, "arguments": arguments}
    return Weights(
        tensors=without_wrappers(tensors), format=origin, known=known, positions="timm"
    )


def _plain_transformer(
    name: str, arguments: Mapping[str, Any]
) -> VisionTransformer | None:
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
    if not isinstance(model, VisionTransformer):
        return None
    return model if _is_plain(model) and _has_tensors_of_vit(model) else None


def _has_tensors_of_vit(model: VisionTransformer) -> bool:
    """Whether the family vit has these tensors and no others: CLIP has a norm before the blocks."""
    grid = model.patch_embed.grid_size
    found = Weights(tensors=model.state_dict(), known=_known(model), grid=grid)
    try:
        settings, _ = inferred_model(found, chosen=None)
    except UserError:
        return False

    with torch.device("meta"):
        arch = settings.resolved(num_classes=0)
        ours = MODELS[arch.name].load().build_model(arch, seed=0)
    return _shapes(ours) == _shapes(model)


def _shapes(model: VisionTransformer) -> dict[str, tuple[int, ...]]:
    """Of all tensors. Another grid has other positions, but as many of tokens."""
    found = {name: tuple(each.shape) for name, each in model.state_dict().items()}
    if POSITIONS in found:
        _, num_rows, width = found[POSITIONS]
        found[POSITIONS] = (num_rows - model.patch_embed.num_patches, width)
    return found


def _is_plain(model: VisionTransformer) -> bool:
    """Whether the family vit computes the same: of what names and shapes of tensors do not show."""
    block: Any = model.blocks[0]
    if type(block) is not Block or not isinstance(block.norm1, nn.LayerNorm):
        return False
    if not isinstance(model.patch_embed, PatchEmbed) or model.pos_embed is None:
        return False

    activation, is_gated = _activation(model), isinstance(block.mlp, GluMlp)
    if activation not in ACTIVATIONS or is_gated != (ACTIVATIONS[activation] is None):
        return False

    # The mean of the patches alone, and a norm after it but after no other pool.
    pools_others = model.pool_include_prefix and model.num_prefix_tokens > 0
    has_own_norm = model.global_pool == "avg" or isinstance(model.fc_norm, nn.Identity)
    return model.global_pool in POOLS and not pools_others and has_own_norm


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
