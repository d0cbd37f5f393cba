"""Folders of transformers (Hugging Face): ViT, DeiT, MAE and DINOv2.

Owns: names of tensors, in one table that is read both ways, and what config.json and
preprocessor_config.json say, in our settings' names.

transformers renames tensors in memory (from 5.0 on); these are the names that it writes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vitscale.config.errors import UserError
from vitscale.models.weights.files import CONFIG, Weights, labels_in_order, read_folder, read_json
from vitscale.models.weights.names import Tensors, joined, numbered, split

# (theirs, ours); {} is the number of a block. Names of tensors, or of modules with weight and bias.
_SHARED = (
    ("embeddings.cls_token", "cls_token"),
    ("embeddings.position_embeddings", "pos_embed"),
    ("embeddings.patch_embeddings.projection", "patch_embed.proj"),
    ("layernorm", "norm"),
    ("encoder.layer.{}.attention.attention.query", "blocks.{}.attn.query"),
    ("encoder.layer.{}.attention.attention.key", "blocks.{}.attn.key"),
    ("encoder.layer.{}.attention.attention.value", "blocks.{}.attn.value"),
    ("encoder.layer.{}.attention.output.dense", "blocks.{}.attn.proj"),
)
_VIT = (
    *_SHARED,
    ("encoder.layer.{}.layernorm_before", "blocks.{}.norm1"),
    ("encoder.layer.{}.layernorm_after", "blocks.{}.norm2"),
    ("encoder.layer.{}.intermediate.dense", "blocks.{}.mlp.fc1"),
    ("encoder.layer.{}.output.dense", "blocks.{}.mlp.fc2"),
)
_GATED = (
    ("encoder.layer.{}.mlp.weights_in", "blocks.{}.mlp.fc1"),
    ("encoder.layer.{}.mlp.weights_out", "blocks.{}.mlp.fc2"),
)
_DINOV2 = (
    *_SHARED,
    ("encoder.layer.{}.norm1", "blocks.{}.norm1"),
    ("encoder.layer.{}.norm2", "blocks.{}.norm2"),
    ("encoder.layer.{}.layer_scale1.lambda1", "blocks.{}.ls1.gamma"),
    ("encoder.layer.{}.layer_scale2.lambda1", "blocks.{}.ls2.gamma"),
    *_GATED,
    ("encoder.layer.{}.mlp.fc1", "blocks.{}.mlp.fc1"),
    ("encoder.layer.{}.mlp.fc2", "blocks.{}.mlp.fc2"),
)
_HEAD = (("classifier", "head"),)
# model_type of config.json: (prefix of the trunk, names below it, names without the prefix).
FAMILIES: dict[str, tuple[str, tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]] = {
    "vit": ("vit.", _VIT, _HEAD),
    "vit_mae": ("vit.", _VIT, ()),
    "deit": (
        "deit.",
        (*_VIT, ("embeddings.distillation_token", "dist_token")),
        (*_HEAD, ("cls_classifier", "head"), ("distillation_classifier", "head_dist")),
    ),
    "dinov2": ("dinov2.", _DINOV2, _HEAD),
    "dinov2_with_registers": (
        "dinov2_with_registers.",
        (*_DINOV2, ("embeddings.register_tokens", "reg_token")),
        _HEAD,
    ),
}
# Not of the trunk or its classifier: the pooler of plain models, the token for masked patches, the
# decoder of MAE.
UNUSED = ("pooler.", "embeddings.mask_token", "decoder.")

# transformers' names of activations; it computes `gelu_new` and `gelu_fast` with tanh.
GELUS = {"gelu": "erf", "gelu_new": "tanh", "gelu_fast": "tanh", "gelu_pytorch_tanh": "tanh"}
# PIL's numbers of filters.
RESAMPLES = {2: "bilinear", 3: "bicubic"}
HALF = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5), "eval_resize": "squash"}
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
CENTRE = {"eval_resize": "center_crop", "eval_crop_fraction": 224 / 256}
PREPROCESSOR = "preprocessor_config.json"


def from_huggingface(tensors: Tensors, model_type: str) -> tuple[Tensors, list[str]]:
    """The tensors under our names, and the names that are left out.

    Q, K and V are joined. Unknown tensors keep their names, which the table of misfits then lists.
    Raises KeyError for a model type that is not in `FAMILIES`.
    """
    prefix, below, beside = FAMILIES[model_type]
    bare = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    used = {name: tensor for name, tensor in bare.items() if not name.startswith(UNUSED)}
    left_out = [name for name in tensors if name.removeprefix(prefix).startswith(UNUSED)]
    return joined(_renamed(used, dict((*below, *beside)))), left_out


def to_huggingface(
    weights: Mapping[str, torch.Tensor], model_type: str, *, gated: bool = False
) -> Tensors:
    """Our tensors under the names that transformers reads; the inverse of `from_huggingface`.

    gated: the MLPs are SwiGLU. Unknown tensors keep their names. Raises KeyError as
    `from_huggingface`.
    """
    prefix, below, beside = FAMILIES[model_type]
    # The last name counts where two have the same meaning.
    names = {ours: prefix + theirs for theirs, ours in (*below, *(_GATED if gated else ()))}
    return _renamed(split(weights), names | {ours: theirs for theirs, ours in beside})


def _renamed(tensors: Tensors, names: Mapping[str, str]) -> Tensors:
    found = {}
    for name, tensor in tensors.items():
        stem, part = re.fullmatch(r"(.*?)(\.weight|\.bias|)", name).groups()  # type: ignore[union-attr]  # always
        template, number = numbered(stem)
        found[names[template].format(number) + part if template in names else name] = tensor
    return found


def read_huggingface_folder(folder: Path, config: Mapping[str, Any]) -> Weights:
    """Read a folder. Raises UserError for another family of models, and for damaged files."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        what = f"describes a model of type {model_type!r}" if model_type else "names no model_type"
        raise UserError(
            what,
            where=str(folder / CONFIG),
            allowed=f"{', '.join(FAMILIES)}, or a folder of timm, which has `architecture`",
            next_step="use weights of one of these",
        )
    known, preprocessing = _known(config, folder), _preprocessing(folder, model_type)
    rows, columns = _pair(config.get("image_size", 224))
    patch = _pair(config.get("patch_size", 16))
    grid = (rows // patch[0], columns // patch[1])
    tensors, left_out = from_huggingface(read_folder(folder), model_type)
    if "dist_token" in tensors and "head.weight" in tensors and "head_dist.weight" not in tensors:
        # A distillation token that no head reads (DeiTForImageClassification) is a register.
        # Registers have no positions: those of both tokens are added to them.
        pos_1LD = tensors["pos_embed"]
        tensors["reg_token"] = tensors.pop("dist_token") + pos_1LD[:, 1:2]
        tensors["cls_token"] = tensors["cls_token"] + pos_1LD[:, :1]
        tensors["pos_embed"] = pos_1LD[:, 2:]
    return Weights(
        tensors=tensors,
        format=f"Hugging Face's {model_type}",
        known=known,
        preprocessing=preprocessing,
        classes=labels_in_order(config.get("id2label")),
        grid=grid,
        assumed=() if (folder / PREPROCESSOR).is_file() else preprocessing,
        left_out=tuple(left_out),
    )


def _pair(size: Any) -> tuple[int, int]:
    rows, columns = (size, size) if isinstance(size, int) else size
    return int(rows), int(columns)


def _known(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    known: dict[str, Any] = {
        "num_heads": int(config["num_attention_heads"]),
        # transformers' own default.
        "layer_norm_eps": float(config.get("layer_norm_eps", 1e-12)),
    }
    if config.get("use_swiglu_ffn"):
        return known
    activation = config.get("hidden_act", "gelu")
    if activation not in GELUS:
        what = f"hidden_act {activation!r} is not supported"
        raise UserError(what, where=str(folder / CONFIG), allowed=", ".join(GELUS))
    return known | {"gelu": GELUS[activation]}


def _preprocessing(folder: Path, model_type: str) -> dict[str, Any]:
    """Read preprocessor_config.json; without it, take transformers' image processor: defaults of
    ViTImageProcessor, DeiTImageProcessor and of DINOv2's published folders."""
    default: dict[str, Any] = {**IMAGENET, **CENTRE, "eval_interpolation": "bicubic"}
    if model_type.startswith("vit"):
        default = HALF
    path = folder / PREPROCESSOR
    if not path.is_file():
        return default
    config = read_json(path)
    is_normalised = bool(config.get("do_normalize", True))
    found: dict[str, Any] = {
        "mean": tuple(config.get("image_mean") or default["mean"]) if is_normalised else (0.0,) * 3,
        "std": tuple(config.get("image_std") or default["std"]) if is_normalised else (1.0,) * 3,
    }
    resample = config.get("resample", 2)
    if resample not in RESAMPLES:
        what = f"resample {resample!r} is not supported"
        raise UserError(what, where=str(path), allowed="2 (bilinear), 3 (bicubic)")
    found["eval_interpolation"] = RESAMPLES[resample]
    if not config.get("do_center_crop", False):
        return found | {"eval_resize": "squash"}
    crop, short = _side(config.get("crop_size", 224)), _side(config.get("size", 256))
    if not 0 < crop <= short:
        raise UserError(
            f"crops {crop} px of {short} px", where=str(path), allowed="a crop within the image"
        )
    return found | {"eval_resize": "center_crop", "eval_crop_fraction": crop / short}


def _side(size: Any) -> int:
    """Pixels of the short side, of any form that image processors write."""
    if isinstance(size, dict):
        size = size.get("shortest_edge") or min(size["height"], size["width"])
    return int(size)
