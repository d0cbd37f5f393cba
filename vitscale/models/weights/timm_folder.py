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
from vitscale.models.timm_model import is_resized_bilinearly, pretrained_config
from vitscale.models.weights.files import CONFIG, Weights, labels_in_order, read_folder
from vitscale.models.weights.names import Tensors, from_pytorch, without_wrappers
from vitscale.models.weights.pixels import timm_preprocessing
from vitscale.models.weights.transfer import POSITIONS, inferred_model

# SiLU is of SwiGLU, which shapes show.
ACTIVATIONS = {
    "none": "erf",
    "GELU": "erf",
    "tanh": "tanh",
    "GELUTanh": "tanh",
    "SiLU": None,
}
POOLS = {"token": "cls", "avg": "gap", "map": "map"}
# A class of ImageNet, whose words are easier to read and found again among its ids.
SYNSET = re.compile(r"n\d{8}")
# Options of timm's train.py that decide how images are read.
PIXEL_ARGUMENTS = ("mean", "std", "interpolation", "crop_pct", "crop_mode", "img_size")


def read_timm_folder(
    folder: Path, config: Mapping[str, Any], *, as_timm: bool
) -> Weights:
    """Read a folder, as `timm_weights`.

    Raises UserError where timm does not know the model.
    """
    # Before timm 0.8 the keys of pretrained_cfg stood beside the architecture.
    described: Any = config.get("pretrained_cfg", config) or {}
    where = str(folder / CONFIG)
    pixels = timm_preprocessing(described, where=where)
    source = timm_weights(
        read_folder(folder),
        str(config["architecture"]),
        arguments=config.get("model_args") or {},
        input_size=described.get("input_size"),
        as_timm=as_timm,
        where=where,
    )

    # Only a folder that names mean and std leaves nothing to assume.
    assumed = tuple(pixels)
    if "mean" in described and "std" in described:
        assumed = ()
    return replace(
        source,
        preprocessing=pixels,
        classes=_class_names(config, described),
        assumed=assumed,
    )


def _class_names(
    config: Mapping[str, Any], described: Mapping[str, Any]
) -> tuple[str, ...] | None:
    """Names by label; the words of ImageNet's ids, where the folder has them too."""
    names = (
        config.get("label_names")
        or described.get("label_names")
        or described.get("labels")
    )
    words = config.get("label_descriptions") or described.get("label_descriptions")
    if isinstance(names, list) and isinstance(words, dict):
        names = [
            words.get(name, name) if SYNSET.fullmatch(str(name)) else name
            for name in names
        ]
    return labels_in_order(names)


def read_timm_checkpoint(
    tensors: Tensors, arguments: Mapping[str, Any], *, as_timm: bool, where: str
) -> Weights:
    """Read what timm's train.py or DeiT's main.py saved: `arguments` of its command line, which say
    how the model was built and how its images were made."""
    name = arguments["model"]
    size = arguments.get("input_size")
    model_arguments = dict(arguments.get("model_kwargs") or {})
    if arguments.get("gp") is not None:
        model_arguments = {"global_pool": arguments["gp"], **model_arguments}
    pixels = {key: arguments.get(key) for key in PIXEL_ARGUMENTS}
    pixels["crop_pct"] = pixels["crop_pct"] or arguments.get("eval_crop_ratio")

    # DeiT has one number, which builds the model too; timm has the shape of an image.
    if isinstance(size, int):
        model_arguments = {"img_size": size, **model_arguments}
        pixels["img_size"] = size
    else:
        pixels["input_size"] = size

    config = asdict(pretrained_config(name, where=where))
    source = timm_weights(
        tensors,
        name,
        arguments=model_arguments,
        input_size=size,
        as_timm=as_timm,
        where=where,
    )
    return replace(
        source,
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
    published = pretrained_config(name, where=where)
    arguments = dict(arguments)
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

    # Both have settings of their own; the classes are counted in the weights.
    size = arguments.pop("img_size", None) or input_size or published.input_size
    arguments.pop("num_classes", None)
    if not isinstance(size, int):
        size = size[-1]
    known = {"name": "timm", "model": name, "image_size": size, "arguments": arguments}
    return Weights(
        tensors=without_wrappers(tensors), format=origin, known=known, positions="timm"
    )


def _plain_transformer(
    name: str, arguments: Mapping[str, Any]
) -> VisionTransformer | None:
    """The model that timm would build, without memory; None if it is not in the family vit."""
    # The family vit would resize their positions as those of timm's other models.
    if is_resized_bilinearly(name):
        return None
    # Other arguments are of timm's factory, which also takes paths of files to load.
    if not set(arguments) <= set(inspect.signature(VisionTransformer).parameters):
        return None
    try:
        with torch.device("meta"):
            # Without classes the rest is the same, and classes are counted in the weights.
            model: Any = timm.create_model(name, **{**arguments, "num_classes": 0})
    except Exception:  # any kind; the family timm says why
        return None
    if not isinstance(model, VisionTransformer) or not _is_plain(model):
        return None
    if not _has_tensors_of_vit(model):
        return None
    return model


def _has_tensors_of_vit(model: VisionTransformer) -> bool:
    """Whether the family vit has these tensors and no others: CLIP has a norm before the blocks."""
    grid = model.patch_embed.grid_size
    source = Weights(tensors=model.state_dict(), known=_known(model), grid=grid)
    try:
        settings, _ = inferred_model(source, chosen=None)
    except UserError:
        return False

    # Built without memory: only the shapes are compared.
    with torch.device("meta"):
        arch = settings.resolved(num_classes=0)
        ours = MODELS[arch.name].load().build_model(arch, seed=0)
    return _shapes(ours) == _shapes(model)


def _shapes(model: VisionTransformer) -> dict[str, tuple[int, ...]]:
    """By the name of each tensor. Another grid has other positions, but as many of tokens."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if POSITIONS in shapes:
        _, num_rows, width = shapes[POSITIONS]
        shapes[POSITIONS] = (num_rows - model.patch_embed.num_patches, width)
    return shapes


def _is_plain(model: VisionTransformer) -> bool:
    """Whether the family vit computes the same: of what names and shapes of tensors do not show."""
    block: Any = model.blocks[0]
    if type(block) is not Block or not isinstance(block.norm1, nn.LayerNorm):
        return False
    if not isinstance(model.patch_embed, PatchEmbed) or model.pos_embed is None:
        return False

    # SiLU is the activation of SwiGLU alone, and every other one of a plain MLP.
    activation = _activation(model)
    if activation not in ACTIVATIONS:
        return False
    if isinstance(block.mlp, GluMlp) != (ACTIVATIONS[activation] is None):
        return False

    # The mean is of the patches alone, and a norm comes after it but after no other pool.
    if model.pool_include_prefix and model.num_prefix_tokens > 0:
        return False
    if model.global_pool != "avg" and not isinstance(model.fc_norm, nn.Identity):
        return False
    return model.global_pool in POOLS


def _activation(model: VisionTransformer) -> str:
    block: Any = model.blocks[0]
    activation = block.mlp.act
    return str(getattr(activation, "approximate", type(activation).__name__))


def _known(model: VisionTransformer) -> dict[str, Any]:
    block: Any = model.blocks[0]
    known: dict[str, Any] = {
        "num_heads": int(block.attn.num_heads),
        "layer_norm_eps": float(block.norm1.eps),
        "pool": POOLS[model.global_pool],
    }
    gelu = ACTIVATIONS[_activation(model)]
    if gelu is not None:
        known["gelu"] = gelu
    return known
