"""Infer which model a set of tensors is of, and list what the tensors cannot show.

Owns: shapes -> settings of `model`. Leaves out: reading (`reading`), loading (`transfer`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from vitscale.config.errors import UserError
from vitscale.models.registry import MODELS, ModelSettings
from vitscale.models.settings import NUMBERS, PATCH_POOLS
from vitscale.models.timm_model import classifiers, pretrained_config
from vitscale.models.weights.external import ExternalWeights

PATCH = "patch_embed.proj.weight"
# Width -> heads. The papers' sizes (ViT, DeiT, Zhai et al. 2022 (g, G), SigLIP's So400m, DINOv2's
# g); other widths have heads of 64 channels, as most of these.
HEADS = {
    192: 3,
    384: 6,
    768: 12,
    1024: 16,
    1152: 16,
    1280: 16,
    1408: 16,
    1536: 24,
    1664: 16,
}
HEAD_WIDTH = 64
# What other families have: (pattern of a name, what it is).
OTHER_FAMILIES = (
    (r"norm_pre\..*", "a norm before the blocks, as CLIP has"),
    (r".*\.attn\.[qk]_norm\..*", "norms of queries and keys"),
    (r".*relative_position.*", "relative positions, as BEiT has"),
    (r".*\.attn\.([qv]_bias|[qkv]_proj\..*)", "separate Q, K and V, as BEiT and EVA have"),
    (r".*\.(rope|freqs).*", "rotary positions"),
    (r"(patch_embed\.backbone\.|conv_root/).*", "a ResNet below the blocks, as hybrids have"),
    (r"(layers|features)\.\d+\..*", "stages, as Swin has"),
    (r"(layer[1-4]|conv1|stages)\..*", "stages of convolutions"),
)


def inferred_model(
    external: ExternalWeights, *, chosen: ModelSettings | None, path: Path
) -> tuple[ModelSettings, int]:
    """Settings of the model that the weights are of, and its number of classes (0: no head).

    chosen: settings whose keys win over what is inferred, one by one.
    Raises UserError for weights of another family, and where a size cannot be inferred.
    """
    weights = external.weights
    is_timm = external.known.get("name") == "timm"
    if is_timm:
        values = dict(external.known)
    else:
        _refuse_other_families(weights, path)
        values = {"name": "vit", **_transformer(weights, external.grid), **external.known}
        values |= _pool(weights, stated=values.get("pool"))
    mine = {} if chosen is None else {key: getattr(chosen, key) for key in chosen.model_fields_set}
    if mine.get("name", values["name"]) != values["name"]:
        what = f"these weights are of the family {values['name']}, not {mine['name']}"
        raise UserError(what, where="model.name", next_step=f"set model.name={values['name']}")
    if mine.get("preset") is not None:  # its numbers win too
        values = {key: value for key, value in values.items() if key not in NUMBERS}
    values |= mine
    if is_timm:
        names = classifiers(pretrained_config(values["model"]))
        heads = [weights[f"{name}.weight"] for name in names if f"{name}.weight" in weights]
        return _validated(values, path), len(heads[0]) if heads else 0
    if "num_heads" not in values and "preset" not in values:
        values["num_heads"] = _heads(int(values["width"]), path)
    if values.get("distillation_token"):
        values.pop("class_position", None)
    return _validated(values, path), len(_head(weights))


def _refuse_other_families(weights: Mapping[str, torch.Tensor], path: Path) -> None:
    for pattern, what in OTHER_FAMILIES:
        name = next((name for name in weights if re.fullmatch(pattern, name)), None)
        if name is not None:
            raise UserError(
                f"is of another model family: {name!r} belongs to {what}",
                where=str(path),
                allowed="plain Vision Transformers, or with model.name=timm any model of timm",
            )
    needed = (PATCH, "blocks.0.norm1.weight", "blocks.0.mlp.fc1.weight", "blocks.0.mlp.fc2.weight")
    missing = [name for name in needed if name not in weights]
    if missing or weights[PATCH].ndim != 4:
        first = ", ".join(sorted(weights)[:3])
        raise UserError(
            f"holds no Vision Transformer: {missing[0] if missing else PATCH} is missing or has "
            f"another shape; its first names: {first}",
            where=str(path),
            allowed="weights with the names of timm, Google, MAE, DeiT, DINOv2 or transformers",
        )


def _transformer(weights: Mapping[str, torch.Tensor], grid: tuple[int, int]) -> dict[str, Any]:
    blocks = {int(name.split(".")[1]) for name in weights if re.match(r"blocks\.\d+\.", name)}
    hidden = weights["blocks.0.mlp.fc2.weight"].shape[1]
    is_gated = weights["blocks.0.mlp.fc1.weight"].shape[0] == 2 * hidden
    values: dict[str, Any] = {
        "width": weights[PATCH].shape[0],
        "patch_size": weights[PATCH].shape[-1],
        "image_size": _image_size(grid, weights[PATCH].shape[-1]),
        "depth": max(blocks) + 1,
        "mlp_width": hidden,
        "mlp": "swiglu" if is_gated else "gelu",
        "representation_layer": "head.0.weight" in weights,
        "num_registers": weights["reg_token"].shape[1] if "reg_token" in weights else 0,
        "distillation_token": "dist_token" in weights,
        # The value is where training starts; the weights replace it.
        "layer_scale": 1e-5 if "blocks.0.ls1.gamma" in weights else None,
    }
    if "pos_embed" not in weights:
        values["positions"] = "sincos2d"
    elif "cls_token" in weights and values["num_registers"] == 0:
        num_prefix_rows = weights["pos_embed"].shape[1] - grid[0] * grid[1]
        values["class_position"] = num_prefix_rows > 0
    return values


def _pool(weights: Mapping[str, torch.Tensor], *, stated: str | None) -> dict[str, Any]:
    """stated: by a configuration; a norm after the mean or a pooling head shows it too."""
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


def _head(weights: Mapping[str, torch.Tensor]) -> torch.Tensor | tuple[()]:
    for name in ("head.weight", "head.2.weight"):
        if name in weights:
            return weights[name]
    return ()


def _heads(width: int, path: Path) -> int:
    if width in HEADS:
        return HEADS[width]
    if width % HEAD_WIDTH == 0:
        return width // HEAD_WIDTH
    raise UserError(
        f"the number of attention heads at width {width} cannot be inferred",
        where=str(path),
        next_step="set model.num_heads",
    )


def _image_size(grid: tuple[int, int], patch: int) -> int:
    """Pixels a side: images here are square, and positions of another grid are resized."""
    return 224 // patch * patch or patch if grid == (1, 1) else max(grid) * patch


def _validated(values: Mapping[str, Any], path: Path) -> ModelSettings:
    try:
        settings: ModelSettings = MODELS[values["name"]].Settings.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, ("model", *first["loc"])))
        raise UserError(first["msg"], where=key, next_step=f"see {path}") from None
    problems = [UserError(text, where=key) for key, text in settings.problems()]
    if problems:
        raise problems[0]
    return settings
