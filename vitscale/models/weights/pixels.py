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
WHOLE = "squash"
CENTRED = "center_crop"
SQUASHED_CENTRE = "squash_crop"


def crop_fraction(crop: int, resized: int) -> float:
    """The share from which `crop` pixels a side and rounding down give `resized` pixels again."""
    fraction = crop / resized
    # The quotient may be rounded up, and then a pixel is missing.
    if math.floor(crop / fraction) != resized:
        fraction = math.nextafter(fraction, 0)
    return fraction


def _three(values: Any) -> tuple[float, float, float]:
    """A value for each colour, or one for all of them."""
    given = list(values) if isinstance(values, list | tuple) else [values]
    if len(given) == 1:
        given *= 3
    red, green, blue = map(float, given)
    return red, green, blue


# ---- timm ----------------------------------------------------------------------------------------


def timm_preprocessing(
    config: Mapping[str, Any], *, where: str, arguments: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The pixels of timm's `create_transform` for a `pretrained_cfg`.

    arguments: of timm's train.py, which win. Raises UserError for what no setting expresses.
    """
    steps = resolve_data_config(dict(arguments or {}), pretrained_cfg=dict(config))
    allowed = {"crop_mode": ("center", "squash"), "interpolation": FILTERS}
    for key, values in allowed.items():
        if steps[key] not in values:
            raise UserError(
                f"unknown {key} {steps[key]!r}", where=where, allowed=", ".join(values)
            )

    # Shares above 1 add a border, which no setting has.
    fraction = float(steps["crop_pct"])
    _, rows, columns = steps["input_size"]
    if rows != columns or not 0 < fraction <= 1:
        raise UserError(
            f"{rows} x {columns} px of a share {fraction:g} of the image are not supported",
            where=where,
            allowed="square images, a share up to 1",
        )

    pixels = {
        "mean": _three(steps["mean"]),
        "std": _three(steps["std"]),
        "eval_interpolation": steps["interpolation"],
    }
    if steps["crop_mode"] == "center":
        return pixels | {"eval_resize": CENTRED, "eval_crop_fraction": fraction}
    if fraction == 1:
        return pixels | {"eval_resize": WHOLE}
    return pixels | {"eval_resize": SQUASHED_CENTRE, "eval_crop_fraction": fraction}


# ---- transformers --------------------------------------------------------------------------------

PREPROCESSOR = "preprocessor_config.json"
# Pillow's numbers of filters.
RESAMPLES = {2: "bilinear", 3: "bicubic"}
# Defaults of image processors for keys that their file lacks: of all, then by class.
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
    if model_type.startswith("vit"):
        return {**HALF, "eval_interpolation": "bilinear"}
    return PYTORCH


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
        allowed = ", ".join(f"{known}ImageProcessor" for known in _PROCESSORS)
        raise _unsupported(path, f"image_processor_type {name!r}", allowed)

    # A step that nobody here knows would be left out without a word.
    steps = _DEFAULTS | _PROCESSORS[kind] | stated
    for key, value in steps.items():
        if key.startswith("do_") and value and key not in _DEFAULTS:
            raise _unsupported(
                path, f"{key}: true", "resize, centre crop, rescale, normalize"
            )
    if not steps["do_resize"]:
        raise _unsupported(
            path, "do_resize: false", "true, since a model takes one image size"
        )
    if steps["resample"] not in RESAMPLES:
        raise _unsupported(
            path, f"resample {steps['resample']!r}", "2 (bilinear), 3 (bicubic)"
        )

    # Theirs: (pixel * factor - mean) / std. Ours: (pixel / 255 - mean) / std.
    factor = 255.0
    if steps["do_rescale"]:
        factor = 255 * float(steps["rescale_factor"])
    if math.isclose(factor, 1):
        factor = 1.0
    mean = (0.0, 0.0, 0.0)
    std = (1.0, 1.0, 1.0)
    if steps["do_normalize"]:
        mean = _three(steps["image_mean"])
        std = _three(steps["image_std"])
    pixels = {
        "mean": tuple(value / factor for value in mean),
        "std": tuple(value / factor for value in std),
        "eval_interpolation": RESAMPLES[steps["resample"]],
        **_resize(steps, path, keeps_aspect=kind in _SHORT_SIDES),
    }

    # A size that the file does not state is the class's, whatever the model's is.
    if not {"size", "crop_size"} & stated.keys():
        del pixels["image_size"]
    return pixels


def _resize(
    steps: Mapping[str, Any], path: Path, *, keeps_aspect: bool
) -> dict[str, Any]:
    """How the image gets its size, and the size. keeps_aspect: where `size` is one number."""
    resized, is_short = _side(steps["size"], path, is_short=keeps_aspect)
    if not steps["do_center_crop"]:
        if is_short:
            raise _unsupported(
                path, "size: shortest_edge without a crop", "height and width"
            )
        return {"eval_resize": WHOLE, "image_size": resized}

    crop, _ = _side(steps["crop_size"], path, is_short=False)
    if crop > resized:
        raise _unsupported(
            path, f"crops {crop} px of {resized} px", "a crop within the image"
        )
    # Both round the resized side down.
    rule = f"{CENTRED if is_short else SQUASHED_CENTRE}_down"
    fraction = crop_fraction(crop, resized)
    return {"eval_resize": rule, "eval_crop_fraction": fraction, "image_size": crop}


def _side(size: Any, path: Path, *, is_short: bool) -> tuple[int, bool]:
    """Pixels, and whether they are of the short side alone. is_short: if `size` is one number."""
    if isinstance(size, int):
        return size, is_short
    if isinstance(size, dict) and set(size) == {"shortest_edge"}:
        return int(size["shortest_edge"]), True
    # A list has no names of sides.
    names = {"height", "width"}
    sides = set(size)
    if isinstance(size, dict):
        names = set(size)
        sides = set(size.values())
    if names != {"height", "width"} or len(sides) != 1:
        raise _unsupported(path, f"size {size}", "a square, or shortest_edge")
    return int(sides.pop()), False


def _unsupported(path: Path, what: str, allowed: str) -> UserError:
    return UserError(
        f"{what} is not supported",
        where=path,
        allowed=allowed,
        next_step="give a folder without this file, and the keys of `preprocessing`",
    )
