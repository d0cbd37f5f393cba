"""Infer the model that weights belong to, and load them, also into another grid."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import ValidationError
from timm.layers.patch_embed import resample_patch_embed
from torch import nn

from vitscale.config.errors import UserError
from vitscale.models.interface import refuse_misfits
from vitscale.models.positions import resize_position_embedding
from vitscale.models.registry import MODELS, ModelSettings
from vitscale.models.settings import NUMBERS, PATCH_POOLS
from vitscale.models.timm_model import TimmModel, classifiers, pretrained_config
from vitscale.models.weights.files import Weights

# What transfer leaves out: modules that only an objective trains and, unless kept, classifiers.
# The last two: names of MAE's published files.
OBJECTIVE = ("objective.", "decoder_", "mask_token")
HEADS = ("head.", "head_dist.")
MAX_PREFIX_ROWS = 2
POSITIONS, PATCH, CLASS = "pos_embed", "patch_embed.proj.weight", "cls_token"
# Width -> heads. The papers' sizes (ViT, DeiT, Zhai et al. 2022 (g, G), SigLIP's So400m, DINOv2's
# g); other widths have heads of 64 channels, as most of these.
ATTENTION_HEADS = {192: 3, 384: 6, 768: 12, 1024: 16, 1152: 16, 1280: 16, 1408: 16}
ATTENTION_HEADS |= {1536: 24, 1664: 16}
HEAD_WIDTH = 64


def inferred_model(
    found: Weights, *, chosen: ModelSettings | None
) -> tuple[ModelSettings, int]:
    """Settings of the model that the weights are of, and its number of classes (0: no head).

    chosen: settings whose keys win over what is inferred, one by one.
    Raises UserError for weights of another family, and where a size cannot be inferred.
    """
    tensors, values = found.tensors, dict(found.known)
    is_timm = values.setdefault("name", "vit") == "timm"
    if not is_timm:
        _refuse_other_families(tensors, found.where)
        values = {**_transformer(found), **values}
        values |= _pool(tensors, stated=values.get("pool"))
    mine = (
        {}
        if chosen is None
        else {key: getattr(chosen, key) for key in chosen.model_fields_set}
    )
    if mine.get("name", values["name"]) != values["name"]:
        what = f"these weights are of the family {values['name']}, not {mine['name']}"
        raise UserError(
            what, where="model.name", next_step=f"set model.name={values['name']}"
        )
    if mine.get("preset") is not None:  # its numbers win too
        values = {key: value for key, value in values.items() if key not in NUMBERS}
    values |= mine
    if "num_heads" not in values and "preset" not in values and not is_timm:
        width = int(values["width"])
        if width not in ATTENTION_HEADS and width % HEAD_WIDTH:
            what = f"the number of attention heads at width {width} cannot be inferred"
            raise UserError(what, where=found.where, next_step="set model.num_heads")
        values["num_heads"] = ATTENTION_HEADS.get(width, width // HEAD_WIDTH)
    if values.get("distillation_token"):
        values.pop("class_position", None)
    heads = head_layers(tensors, timm_name=values["model"] if is_timm else None)
    num_classes = len(tensors[f"{heads[0]}.weight"]) if heads else 0
    return _validated(values, found.where), num_classes


def head_layers(
    tensors: Mapping[str, torch.Tensor], *, timm_name: str | None
) -> list[str]:
    """The last layers that the weights have; the second is the distillation token's.

    timm_name: of the model, for weights of the family timm.
    """
    # `head.2` follows a representation layer.
    names: tuple[str, ...] = ("head", "head.2", "head_dist")
    if timm_name is not None:
        names = classifiers(pretrained_config(timm_name))
    return [name for name in names if f"{name}.weight" in tensors]


def _refuse_other_families(weights: Mapping[str, torch.Tensor], where: str) -> None:
    needed = (
        PATCH,
        "blocks.0.norm1.weight",
        "blocks.0.mlp.fc1.weight",
        "blocks.0.mlp.fc2.weight",
    )
    missing = [name for name in needed if name not in weights]
    if missing or weights[PATCH].ndim != 4:
        first = ", ".join(sorted(weights)[:3])
        raise UserError(
            f"contains no Vision Transformer: {missing[0] if missing else PATCH} is missing or has "
            f"another shape; its first names: {first}",
            where=where,
            allowed="weights with the names of timm, Google, MAE, DeiT, DINOv2 or transformers, or "
            "with model.name=timm and model.model any model of timm",
        )


def _transformer(found: Weights) -> dict[str, Any]:
    tensors, grid = found.tensors, found.grid
    patch, hidden = (
        tensors[PATCH].shape[-1],
        tensors["blocks.0.mlp.fc2.weight"].shape[1],
    )
    is_gated = tensors["blocks.0.mlp.fc1.weight"].shape[0] == 2 * hidden
    values: dict[str, Any] = {
        "width": tensors[PATCH].shape[0],
        "patch_size": patch,
        # Images here are square, and positions of another grid are resized.
        "image_size": max(grid) * patch
        if grid != (1, 1)
        else 224 // patch * patch or patch,
        "depth": 1
        + max(int(n.split(".")[1]) for n in tensors if re.match(r"blocks\.\d+\.", n)),
        "mlp_width": hidden,
        "mlp": "swiglu" if is_gated else "gelu",
        "representation_layer": "head.0.weight" in tensors,
        "num_registers": tensors["reg_token"].shape[1] if "reg_token" in tensors else 0,
        "distillation_token": "dist_token" in tensors,
        # The value is where training starts; the weights replace it.
        "layer_scale": 1e-5 if "blocks.0.ls1.gamma" in tensors else None,
    }
    if "pos_embed" not in tensors:
        values["positions"] = "sincos2d"
    elif "cls_token" in tensors and values["num_registers"] == 0:
        values["class_position"] = tensors["pos_embed"].shape[1] > grid[0] * grid[1]
    return values


def _pool(weights: Mapping[str, torch.Tensor], *, stated: str | None) -> dict[str, Any]:
    """Infer the pooling from the tensors. stated: the pooling that a configuration names."""
    has_class_token = "cls_token" in weights
    pool = stated or ("cls" if has_class_token else "gap")
    if "attn_pool.latent" in weights:
        pool = "map"
    elif "fc_norm.weight" in weights:
        pool = "gap"
    elif (head := weights.get("head.weight")) is not None and has_class_token:
        # DINOv2's classifiers see the class token and the mean of the patches.
        pool = "cls_mean" if head.shape[1] == 2 * weights[PATCH].shape[0] else pool
    values: dict[str, Any] = {"pool": pool, "pool_norm": "fc_norm.weight" in weights}
    return values | {"class_token": has_class_token} if pool in PATCH_POOLS else values


def _validated(values: Mapping[str, Any], where: str) -> ModelSettings:
    try:
        settings: ModelSettings = MODELS[values["name"]].Settings.model_validate(
            dict(values)
        )
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, ("model", *first["loc"])))
        raise UserError(first["msg"], where=key, next_step=f"see {where}") from None
    problems = [UserError(text, where=key) for key, text in settings.problems()]
    if problems:
        raise problems[0]
    return settings


# ---- loading -------------------------------------------------------------------------------------


def transfer_weights(
    model: nn.Module,
    found: Weights,
    *,
    grid: tuple[int, int],
    convention: str,
    keep_head: bool = False,
    resize_patches: bool = False,
) -> list[str]:
    """Load a trunk; the head (with a representation layer, if any) keeps its fresh values.

    grid: of the model. convention: how positions are resampled to it, as `models.positions`; auto:
    as the library does that the weights come from. keep_head: load the head too.
    resize_patches: resize the patch embedding to the model's patch size.
    A norm after the mean keeps its fresh values if the weights have one before it only (MAE).
    Returns the names of tensors that are left out: what only an objective trained, and that norm.
    Raises UserError with a table of every missing, unknown or misshapen tensor; then nothing was
    loaded.
    """
    weights, where = found.tensors, found.where
    if isinstance(model, TimmModel):
        model.load_weights(
            weights, where=where, keep_head=keep_head, resize_patches=resize_patches
        )
        return []
    left_out = OBJECTIVE if keep_head else (*OBJECTIVE, *HEADS)
    own, given = (
        {
            name: value
            for name, value in tensors.items()
            if not name.startswith(left_out)
        }
        for tensors in (model.state_dict(), weights)
    )
    replaced = _replaced_norm(own, given)
    given |= {name: value for name, value in found.computed.items() if name in own}
    if POSITIONS in given:
        # Class and distillation token may have a position, and registers never have one.
        num_others = given[POSITIONS].shape[1] - math.prod(found.grid)
        num_prefix_rows = min(max(0, num_others), MAX_PREFIX_ROWS)
        try:
            resized_LD = resize_position_embedding(
                given[POSITIONS][0],
                source_grid=found.grid,
                target_grid=grid,
                num_prefix_tokens=num_prefix_rows,
                convention=found.positions if convention == "auto" else convention,
            )
        except ValueError as error:
            raise UserError(str(error), where=where) from None
        given[POSITIONS] = resized_LD[None]
        if POSITIONS in own and CLASS in given:
            # Add or remove the class token's position; their sum stays the same.
            num_wanted = own[POSITIONS].shape[1] - math.prod(grid)
            pos_1LD = given[POSITIONS]
            if (num_prefix_rows, num_wanted) == (1, 0):
                given[CLASS] = given[CLASS].float() + pos_1LD[:, :1]
                given[POSITIONS] = pos_1LD[:, 1:]
            elif (num_prefix_rows, num_wanted) == (0, 1):
                given[POSITIONS] = torch.cat(
                    [torch.zeros_like(pos_1LD[:, :1]), pos_1LD], dim=1
                )
    next_step = "set the keys of `model` to those of the checkpoint's run"
    next_step += ", or keep_head=false" if keep_head else ""
    next_step += ", or model.name=timm for weights of another family"
    ours, theirs = (
        tuple(each[PATCH].shape) if PATCH in each else () for each in (own, given)
    )
    if ours != theirs and ours[:2] == theirs[:2] and len(theirs) == 4:
        # Alike but for the rows and columns of a patch.
        next_step += "; or set init_patch=resize"
        if resize_patches:
            # (B^T)^+ w, where B resizes a patch bilinearly: upwards, tokens of resized patches are
            # those of the patches themselves. PI-resize of FlexiViT, Beyer et al. 2023.
            given[PATCH] = resample_patch_embed(
                given[PATCH].float(),
                list(ours[2:]),
                interpolation="bilinear",
                antialias=False,
            )
    refuse_misfits(own, given, where=where, next_step=next_step)
    model.load_state_dict(given, strict=False)
    return sorted(
        [*(name for name in weights if name.startswith(OBJECTIVE)), *replaced]
    )


def _replaced_norm(
    own: dict[str, torch.Tensor], given: dict[str, torch.Tensor]
) -> list[str]:
    """Take the norm before the mean out of `given`, and the one after it out of `own`.

    As MAE's fine-tuning does: the former normalised single tokens.
    """
    before = [name for name in given if name.startswith("norm.")]
    after = [name for name in own if name.startswith("fc_norm.")]
    if not before or not after or any(name in given for name in after):
        return []
    for name in before:
        del given[name]
    for name in after:
        del own[name]
    return before
