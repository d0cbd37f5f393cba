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

# Modules that only an objective trains. The last two: names of MAE's published files.
OF_OBJECTIVE = "objective."
OBJECTIVE = (OF_OBJECTIVE, "decoder_", "mask_token")
MAX_PREFIX_ROWS = 2
POSITIONS = "pos_embed"
PATCH = "patch_embed.proj.weight"
CLASS = "cls_token"
# Most of the papers' models have heads of 64 channels; SigLIP's So400m, H, g (Zhai et al. 2022,
# DINOv2) and G have 16 heads at these widths.
HEAD_WIDTH = 64
WIDTHS_OF_16_HEADS = (1152, 1280, 1408, 1664)


def inferred_model(
    source: Weights, *, chosen: ModelSettings | None
) -> tuple[ModelSettings, int]:
    """Settings of the model that the weights are of, and its number of classes (0: no head).

    chosen: settings whose keys win over what is inferred, one by one.
    Raises UserError for weights of another family, and where a size cannot be inferred.
    """
    tensors = source.tensors
    values = dict(source.known)
    is_timm = values.setdefault("name", "vit") == "timm"
    if not is_timm:
        _refuse_other_families(tensors, source.where)
        values = {**_transformer(source), **values}
        values |= _pool(tensors, stated=values.get("pool"))

    wanted = {}
    if chosen is not None:
        wanted = {key: getattr(chosen, key) for key in chosen.model_fields_set}
    family = values["name"]
    if wanted.get("name", family) != family:
        raise UserError(
            f"these weights are of the family {family}, not {wanted['name']}",
            where="model.name",
            next_step=f"set model.name={family}",
        )
    # The numbers of a preset win too.
    if wanted.get("preset") is not None:
        values = {key: value for key, value in values.items() if key not in NUMBERS}
    values |= wanted

    # Tensors have the same shape whatever the number of heads.
    if "num_heads" not in values and "preset" not in values and not is_timm:
        width = int(values["width"])
        if width % HEAD_WIDTH:
            raise UserError(
                f"the number of attention heads at width {width} cannot be inferred",
                where=source.where,
                next_step="set model.num_heads",
            )
        values["num_heads"] = width // HEAD_WIDTH
        if width in WIDTHS_OF_16_HEADS:
            values["num_heads"] = 16
    if values.get("distillation_token"):
        values.pop("class_position", None)

    # Classifiers of one model have as many rows.
    num_classes = 0
    heads = head_layers(tensors, timm_name=values["model"] if is_timm else None)
    if heads:
        num_classes = len(tensors[f"{heads[0]}.weight"])

    # DINOv3 was trained by its class token, which transformers gives, too. timm's configuration of
    # the published weights takes the mean of the patches.
    if is_timm and not heads and "dinov3" in values["model"].partition(".")[0]:
        arguments = values.get("arguments", {})
        values["arguments"] = {"global_pool": "token", **arguments}
    return _validated(values, source.where), num_classes


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
    # Every Vision Transformer has these, whatever its options.
    needed = (
        PATCH,
        "blocks.0.norm1.weight",
        "blocks.0.mlp.fc1.weight",
        "blocks.0.mlp.fc2.weight",
    )
    missing = [name for name in needed if name not in weights]
    if not missing and weights[PATCH].ndim != 4:
        missing = [PATCH]

    if missing:
        first = ", ".join(sorted(weights)[:3])
        raise UserError(
            f"contains no Vision Transformer: {missing[0]} is missing or has "
            f"another shape; its first names: {first}",
            where=where,
            allowed="weights with the names of timm, Google, MAE, DeiT, DINOv2 or transformers, or "
            "with model.name=timm and model.model any model of timm",
        )


def _transformer(source: Weights) -> dict[str, Any]:
    tensors = source.tensors
    width, *_, patch = tensors[PATCH].shape
    mlp_width = tensors["blocks.0.mlp.fc2.weight"].shape[1]
    is_gated = tensors["blocks.0.mlp.fc1.weight"].shape[0] == 2 * mlp_width

    # Images here are square, and positions of another grid are resized. Without positions the
    # nearest size to 224 px is taken.
    image_size = max(source.grid) * patch
    if source.grid == (1, 1):
        image_size = 224 // patch * patch or patch

    numbers = [
        int(name.split(".")[1]) for name in tensors if re.match(r"blocks\.\d+\.", name)
    ]
    num_registers = 0
    if "reg_token" in tensors:
        num_registers = tensors["reg_token"].shape[1]
    values: dict[str, Any] = {
        "width": width,
        "patch_size": patch,
        "image_size": image_size,
        "depth": 1 + max(numbers),
        "mlp_width": mlp_width,
        "mlp": "swiglu" if is_gated else "gelu",
        "representation_layer": "head.0.weight" in tensors,
        "num_registers": num_registers,
        "distillation_token": "dist_token" in tensors,
        # The value is where training starts; the weights replace it.
        "layer_scale": 1e-5 if "blocks.0.ls1.gamma" in tensors else None,
    }
    if POSITIONS not in tensors:
        values["positions"] = "sincos2d"
    elif CLASS in tensors and num_registers == 0:
        num_patches = math.prod(source.grid)
        values["class_position"] = tensors[POSITIONS].shape[1] > num_patches
    return values


def _pool(weights: Mapping[str, torch.Tensor], *, stated: str | None) -> dict[str, Any]:
    """Infer the pooling from the tensors. stated: the pooling that a configuration names."""
    has_class_token = CLASS in weights
    pool = stated
    if pool is None:
        pool = "cls" if has_class_token else "gap"

    # Some pools have tensors of their own, and DINOv2's classifiers see the class token and the
    # mean of the patches.
    head = weights.get("head.weight")
    if "attn_pool.latent" in weights:
        pool = "map"
    elif "fc_norm.weight" in weights:
        pool = "gap"
    elif head is not None and has_class_token:
        if head.shape[1] == 2 * weights[PATCH].shape[0]:
            pool = "cls_mean"

    values: dict[str, Any] = {"pool": pool, "pool_norm": "fc_norm.weight" in weights}
    if pool in PATCH_POOLS:
        values["class_token"] = has_class_token
    return values


def _validated(values: Mapping[str, Any], where: str) -> ModelSettings:
    kind = MODELS[values["name"]].Settings
    try:
        settings: ModelSettings = kind.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, ("model", *first["loc"])))
        raise UserError(first["msg"], where=key, next_step=f"see {where}") from None
    for key, text in settings.problems():
        raise UserError(text, where=key)
    return settings


# ---- loading -------------------------------------------------------------------------------------


def transfer_weights(
    model: nn.Module,
    source: Weights,
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
    where = source.where
    if isinstance(model, TimmModel):
        # timm resamples in its own code, which knows no other convention.
        if convention not in ("auto", "timm"):
            raise UserError(
                f"the positions of timm's models are resampled by timm, not as {convention}",
                where="position_embedding",
                allowed="auto, timm",
                next_step="set position_embedding=auto",
            )
        model.load_weights(
            source.tensors,
            where=where,
            keep_head=keep_head,
            resize_patches=resize_patches,
        )
        return [name for name in source.tensors if name.startswith(OF_OBJECTIVE)]

    left_out: tuple[str, ...] = OBJECTIVE
    next_step = "set the keys of `model` to those of the checkpoint's run"
    if keep_head:
        next_step += ", or keep_head=false"
    else:
        heads: Any = model.classifiers
        left_out = (*OBJECTIVE, *(f"{name}." for name in heads))
    next_step += ", or model.name=timm for weights of another family"
    target, given = (
        {
            name: value
            for name, value in tensors.items()
            if not name.startswith(left_out)
        }
        for tensors in (model.state_dict(), source.tensors)
    )

    # Fixed positions are in no file, and a model that learns them starts from them.
    replaced = _replaced_norm(target, given)
    given |= {name: value for name, value in source.computed.items() if name in target}
    if POSITIONS in given:
        if convention == "auto":
            convention = source.positions
        _resize_positions(given, target, source, grid=grid, convention=convention)

    # Kernels that are alike but for the rows and columns of a patch.
    ours = target[PATCH].shape if PATCH in target else ()
    theirs = given[PATCH].shape if PATCH in given else ()
    if ours != theirs and ours[:2] == theirs[:2] and len(theirs) == 4:
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

    refuse_misfits(target, given, where=where, next_step=next_step)
    model.load_state_dict(given, strict=False)
    trained_alone = [name for name in source.tensors if name.startswith(OBJECTIVE)]
    return sorted([*trained_alone, *replaced])


def _resize_positions(
    given: dict[str, torch.Tensor],
    target: Mapping[str, torch.Tensor],
    source: Weights,
    *,
    grid: tuple[int, int],
    convention: str,
) -> None:
    """Resize the positions in `given` to the grid of the model, whose tensors `target` are.

    Raises UserError where they do not fit the grid of their source.
    """
    # Class and distillation token may have a position, and registers never have one.
    num_others = given[POSITIONS].shape[1] - math.prod(source.grid)
    num_prefix_rows = min(max(0, num_others), MAX_PREFIX_ROWS)
    try:
        resized_LD = resize_position_embedding(
            given[POSITIONS][0],
            source_grid=source.grid,
            target_grid=grid,
            num_prefix_tokens=num_prefix_rows,
            convention=convention,
        )
    except ValueError as error:
        raise UserError(str(error), where=source.where) from None
    pos_1LD = resized_LD[None]
    given[POSITIONS] = pos_1LD
    if POSITIONS not in target or CLASS not in given:
        return

    # Add or remove the class token's position; the sum of the two stays the same.
    num_target_rows = target[POSITIONS].shape[1] - math.prod(grid)
    if num_prefix_rows == 1 and num_target_rows == 0:
        given[CLASS] = given[CLASS].float() + pos_1LD[:, :1]
        given[POSITIONS] = pos_1LD[:, 1:]
    elif num_prefix_rows == 0 and num_target_rows == 1:
        zero_11D = torch.zeros_like(pos_1LD[:, :1])
        given[POSITIONS] = torch.cat([zero_11D, pos_1LD], dim=1)


def _replaced_norm(
    target: dict[str, torch.Tensor], given: dict[str, torch.Tensor]
) -> list[str]:
    """Take the norm before the mean out of `given`, and the one after it out of `target`.

    As MAE's fine-tuning does: the former normalised single tokens.
    """
    before = [name for name in given if name.startswith("norm.")]
    after = [name for name in target if name.startswith("fc_norm.")]
    if not before or not after or any(name in given for name in after):
        return []
    for name in before:
        del given[name]
    for name in after:
        del target[name]
    return before
