"""Read a folder of transformers (Hugging Face).

Owns: what config.json and preprocessor_config.json say, in our settings' names.
Leaves out: names of tensors (`names`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vitscale.config.errors import UserError
from vitscale.models.weights.external import ExternalWeights
from vitscale.models.weights.files import read_json
from vitscale.models.weights.folder import CONFIG, labels_in_order, read_weights
from vitscale.models.weights.names.huggingface import FAMILIES, from_huggingface

PREPROCESSOR = "preprocessor_config.json"
# transformers' names of activations; it computes `gelu_new` and `gelu_fast` with tanh.
GELUS = {"gelu": "erf", "gelu_new": "tanh", "gelu_fast": "tanh", "gelu_pytorch_tanh": "tanh"}
# PIL's numbers of filters.
RESAMPLES = {2: "bilinear", 3: "bicubic"}
HALF = (0.5, 0.5, 0.5)
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
CENTRE = {"eval_resize": "center_crop", "eval_crop_fraction": 224 / 256}
BICUBIC = {"eval_interpolation": "bicubic"}
# Without preprocessor_config.json: the defaults of ViTImageProcessor, DeiTImageProcessor and of
# DINOv2's published folders.
PREPROCESSING: dict[str, dict[str, Any]] = {
    "vit": {"mean": HALF, "std": HALF, "eval_resize": "squash"},
    "deit": {**IMAGENET, **CENTRE, **BICUBIC},
    "dinov2": {**IMAGENET, **CENTRE, **BICUBIC},
}


def read_huggingface_folder(folder: Path, config: Mapping[str, Any]) -> ExternalWeights:
    """Raises UserError for a folder of another model family, a damaged one, or an unknown one."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        what = f"describes a model of type {model_type!r}" if model_type else "names no model_type"
        raise UserError(
            what,
            where=str(folder / CONFIG),
            allowed=f"{', '.join(FAMILIES)}, or a folder of timm, which has `architecture`",
            next_step="use weights of one of these",
        )
    try:
        known = _known(config, folder)
        preprocessing = _preprocessing(folder, str(model_type))
        grid = _grid(config)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        if isinstance(error, UserError):
            raise
        what = f"is not a whole description of a {model_type} ({type(error).__name__}: {error})"
        raise UserError(what, where=str(folder / CONFIG)) from None
    weights, left_out = from_huggingface(read_weights(folder), str(model_type))
    if "dist_token" in weights and "head.weight" in weights and "head_dist.weight" not in weights:
        weights = _with_register(weights)
    return ExternalWeights(
        weights=weights,
        format=f"Hugging Face's {model_type}",
        known=known,
        preprocessing=preprocessing,
        classes=labels_in_order(config.get("id2label")),
        grid=grid,
        assumed=False,
        left_out=tuple(left_out),
    )


def _known(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Values of `model` that shapes do not show."""
    activation = config.get("hidden_act", "gelu")
    is_gated = bool(config.get("use_swiglu_ffn"))
    if activation not in GELUS and not is_gated:
        raise UserError(
            f"hidden_act {activation!r} is no activation of the models here",
            where=str(folder / CONFIG),
            allowed=", ".join(GELUS),
        )
    known: dict[str, Any] = {
        "num_heads": int(config["num_attention_heads"]),
        # transformers' own default.
        "layer_norm_eps": float(config.get("layer_norm_eps", 1e-12)),
    }
    if not is_gated:
        known["gelu"] = GELUS[activation]
    return known


def _with_register(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A distillation token that no head reads (DeiTForImageClassification) is a register.

    Registers have no positions: those of both tokens are added to them.
    """
    found = dict(weights)
    pos_1LD = found["pos_embed"]
    found["reg_token"] = found.pop("dist_token") + pos_1LD[:, 1:2]
    found["cls_token"] = found["cls_token"] + pos_1LD[:, :1]
    found["pos_embed"] = pos_1LD[:, 2:]
    return found


def _pair(size: Any) -> tuple[int, int]:
    rows, columns = (size, size) if isinstance(size, int) else size
    return int(rows), int(columns)


def _grid(config: Mapping[str, Any]) -> tuple[int, int]:
    patch = _pair(config.get("patch_size", 16))
    rows, columns = _pair(config.get("image_size", 224))
    return rows // patch[0], columns // patch[1]


def _preprocessing(folder: Path, model_type: str) -> dict[str, Any]:
    """Of preprocessor_config.json; without it, of transformers' image processor."""
    path = folder / PREPROCESSOR
    family = model_type.removesuffix("_with_registers").partition("_")[0]
    if not path.is_file():
        return PREPROCESSING[family]
    config = read_json(path)
    default = PREPROCESSING[family]
    normalised = bool(config.get("do_normalize", True))
    found: dict[str, Any] = {
        "mean": tuple(config.get("image_mean") or default["mean"]) if normalised else (0.0,) * 3,
        "std": tuple(config.get("image_std") or default["std"]) if normalised else (1.0,) * 3,
    }
    resample = config.get("resample", 2)
    if resample not in RESAMPLES:
        raise UserError(
            f"resample {resample!r} is no filter of the evaluations here",
            where=str(path),
            allowed="2 (bilinear), 3 (bicubic)",
        )
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
