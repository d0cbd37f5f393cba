"""The pixels that models of each library expect, in the names of our settings (`data`).

Owns: what timm's configurations, transformers' image processors and Google's code do to an image,
and what is assumed of files that do not say. What no setting expresses is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from timm.data import resolve_data_config

from vitscale.config.errors import UserError
from vitscale.models.weights.files import read_json

HALF = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5), "eval_resize": "squash"}
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
CENTRE = {"eval_resize": "center_crop", "eval_crop_fraction": 224 / 256}
# vision_transformer's input_pipeline.py; tf.image.resize does not smooth what it makes smaller.
GOOGLE: dict[str, Any] = {
    **HALF,
    "eval_interpolation": "bilinear",
    "eval_antialias": False,
}
# MAE, DeiT and DINOv2 evaluate on the centre of bicubically resized images.
PYTORCH: dict[str, Any] = {**IMAGENET, **CENTRE, "eval_interpolation": "bicubic"}
FILTERS = ("bilinear", "bicubic")
WHOLE, CENTRED, SQUASHED_CENTRE = "squash", "center_crop", "squash_crop"


def crop_fraction(crop: int, resized: int) -> float:
    """The share from which `crop` pixels a side and rounding down give `resized` pixels again."""
    fraction = crop / resized
    return (
        fraction
        if math.floor(crop / fraction) == resized
        else math.nextafter(fraction, 0)
    )


def _three(values: Any) -> tuple[float, float, float]:
    """A value for each colour, or one for all of them."""
    given = list(values) if isinstance(values, list | tuple) else [values]
    red, green, blue = map(float, given * 3 if len(given) == 1 else given)
    return red, green, blue


# ---- timm ----------------------------------------------------------------------------------------


def timm_preprocessing(
    config: Mapping[str, Any], *, where: str, arguments: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The pixels of timm's `create_transform` for a `pretrained_cfg`.

    arguments: of timm's train.py, which win. Raises UserError for what no setting expresses.
    """
    how = resolve_data_config(dict(arguments or {}), pretrained_cfg=dict(config))
    allowed = {"crop_mode": ("center", "squash"), "interpolation": FILTERS}
    for key, values in allowed.items():
        if how[key] not in values:
            what = f"unknown {key} {how[key]!r}"
            raise UserError(what, where=where, allowed=", ".join(values))
    fraction, (_, rows, columns) = float(how["crop_pct"]), how["input_size"]
    if rows != columns or not 0 < fraction <= 1:
        what = f"{rows} x {columns} px of a share {fraction:g} of the image are not supported"
        raise UserError(what, where=where, allowed="square images, a share up to 1")

    found = {
        "mean": _three(how["mean"]),
        "std": _three(how["std"]),
        "eval_interpolation": how["interpolation"],
    }
    if how["crop_mode"] == "center":
        return found | {"eval_resize": CENTRED, "eval_crop_fraction": fraction}
    if fraction == 1:
        return found | {"eval_resize": WHOLE}
    return found | {"eval_resize": SQUASHED_CENTRE, "eval_crop_fraction": fraction}


# ---- transformers --------------------------------------------------------------------------------

PREPROCESSOR = "preprocessor_config.json"
# Pillow's numbers of filters.
RESAMPLES = {2: "bilinear", 3: "bicubic"}
# What an image processor does where its file has no such key: of all, then by class.
_DEFAULTS: dict[str, Any] = {
    "do_resize": True,
    "do_center_crop": False,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "do_convert_rgb": True,
    "image_mean": 0.5,
    "image_std": 0.5,
    "resample": 3,
    "crop_size": 224,
}
_CLIP: dict[str, Any] = {
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
    "size": {"shortest_edge": 224},
    "do_center_crop": True,
}
_PROCESSORS: dict[str, dict[str, Any]] = {
    "ViT": {"size": {"height": 224, "width": 224}, "resample": 2},
    "DeiT": {"size": {"height": 256, "width": 256}, "do_center_crop": True},
    "Bit": _CLIP,
    "CLIP": _CLIP,
}
# Classes that keep the aspect where `size` is one number.
_SHORT_SIDES = ("Bit", "CLIP")
# The class where the file names none, by model_type.
_OF_MODELS = {"vit": "ViT", "vit_mae": "ViT", "deit": "DeiT", "dinov2": "Bit"}


def assumed_pixels(model_type: str) -> dict[str, Any]:
    """The pixels of a folder without a file: of ViTImageProcessor, or of the published folders."""
    return (
        {**HALF, "eval_interpolation": "bilinear"}
        if model_type.startswith("vit")
        else PYTORCH
    )


def huggingface_pixels(path: Path, model_type: str) -> dict[str, Any]:
    """The pixels of the image processor that a preprocessor_config.json describes.

    With `image_size`, pixels a side, where the file states it.
    Raises UserError for steps that no setting expresses.
    """
    stated = {key: value for key, value in read_json(path).items() if value is not None}
    name = stated.get("image_processor_type") or stated.get("feature_extractor_type")
    kind = _OF_MODELS.get(model_type, "Bit")
    if name is not None:
        kind = re.sub(r"(ImageProcessor|FeatureExtractor)(Fast|Pil)?$", "", str(name))
    if kind not in _PROCESSORS:
        allowed = ", ".join(f"{each}ImageProcessor" for each in _PROCESSORS)
        raise _unsupported(path, f"image_processor_type {name!r}", allowed)

    how = _DEFAULTS | _PROCESSORS[kind] | stated
    others = [
        key
        for key in how
        if key.startswith("do_") and how[key] and key not in _DEFAULTS
    ]
    if others:
        raise _unsupported(
            path, f"{others[0]}: true", "resize, centre crop, rescale, normalize"
        )
    if not how["do_resize"]:
        raise _unsupported(
            path, "do_resize: false", "true, since a model takes one image size"
        )
    if how["resample"] not in RESAMPLES:
        raise _unsupported(
            path, f"resample {how['resample']!r}", "2 (bilinear), 3 (bicubic)"
        )

    # Theirs: (pixel * factor - mean) / std. Ours: (pixel / 255 - mean) / std.
    factor = 255 * float(how["rescale_factor"]) if how["do_rescale"] else 255.0
    factor = 1.0 if math.isclose(factor, 1) else factor
    mean = _three(how["image_mean"] if how["do_normalize"] else 0.0)
    std = _three(how["image_std"] if how["do_normalize"] else 1.0)
    found = {
        "mean": tuple(value / factor for value in mean),
        "std": tuple(value / factor for value in std),
        "eval_interpolation": RESAMPLES[how["resample"]],
        **_resize(how, path, keeps_aspect=kind in _SHORT_SIDES),
    }
    if not {"size", "crop_size"} & stated.keys():
        # Then it is the class's, whatever the model's is.
        del found["image_size"]
    return found


def _resize(
    how: Mapping[str, Any], path: Path, *, keeps_aspect: bool
) -> dict[str, Any]:
    """How the image gets its size, and the size. keeps_aspect: where `size` is one number."""
    resized, is_short = _side(how["size"], path, is_short=keeps_aspect)
    if not how["do_center_crop"]:
        if is_short:
            raise _unsupported(
                path, "size: shortest_edge without a crop", "height and width"
            )
        return {"eval_resize": WHOLE, "image_size": resized}

    crop, _ = _side(how["crop_size"], path, is_short=False)
    if crop > resized:
        raise _unsupported(
            path, f"crops {crop} px of {resized} px", "a crop within the image"
        )
    rule = f"{CENTRED if is_short else SQUASHED_CENTRE}_down"
    fraction = crop_fraction(crop, resized)
    return {"eval_resize": rule, "eval_crop_fraction": fraction, "image_size": crop}


def _side(size: Any, path: Path, *, is_short: bool) -> tuple[int, bool]:
    """Pixels, and whether they are of the short side alone. is_short: if `size` is one number."""
    if isinstance(size, int):
        return size, is_short
    if isinstance(size, dict) and set(size) == {"shortest_edge"}:
        return int(size["shortest_edge"]), True
    sides = list(size.values()) if isinstance(size, dict) else list(size)
    names = set(size) if isinstance(size, dict) else {"height", "width"}
    if names != {"height", "width"} or len(set(sides)) != 1:
        raise _unsupported(path, f"size {size}", "a square, or shortest_edge")
    return int(sides[0]), False


def _unsupported(path: Path, what: str, allowed: str) -> UserError:
    return UserError(
        f"{what} is not supported",
        where=str(path),
        allowed=allowed,
        next_step="give a folder without this file, and the keys of `preprocessing`",
    )
