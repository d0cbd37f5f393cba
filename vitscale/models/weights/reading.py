"""Read external weights, in files and folders, under our names.

No file runs code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

import timm

from vitscale.config.errors import UserError
from vitscale.models import timm_model
from vitscale.models.settings import Architecture, TimmSettings
from vitscale.models.weights import google, names, pixels
from vitscale.models.weights.files import (
    CLASSES_NAME,
    CONFIG,
    NOT_STATED,
    SUFFIXES,
    TorchFile,
    Weights,
    file_beside,
    labels_in_order,
    no_average,
    read_json,
    read_tensors,
    read_torch_file,
)
from vitscale.models.weights.huggingface import read_huggingface_folder
from vitscale.models.weights.timm_folder import read_timm_checkpoint, read_timm_folder

# Written by an export (`finetune/exporting/format.py`): what a folder says of its weights.
DESCRIPTION = "vitscale.json"
FORMAT_VERSION = 1
EXPORTED = ("model.safetensors", "model.npz")
# Types of files that hold tensors alone.
WITHOUT_AVERAGE = (".npz", ".safetensors")
PREPROCESSING = (
    "eval_resize",
    "eval_crop_fraction",
    "eval_interpolation",
    "eval_antialias",
)
# Defaults that a file leaves out, by format. Google: vision_transformer, models_vit.py. PyTorch:
# timm's models, and MAE, DeiT and DINOv2.
GOOGLE: dict[str, Any] = {
    "format": "Google's names",
    "known": {"gelu": "tanh", "layer_norm_eps": 1e-6},
    "preprocessing": pixels.GOOGLE,
}
PYTORCH: dict[str, Any] = {
    "format": "timm's names",
    "known": {"gelu": "erf", "layer_norm_eps": 1e-6},
    "preprocessing": pixels.PYTORCH,
    "positions": "timm",
}


def is_external(path: Path) -> bool:
    """True if `init=` names external weights rather than a run or a checkpoint."""
    if path.is_dir():
        return any((path / name).is_file() for name in (CONFIG, DESCRIPTION))
    return path.suffix in SUFFIXES


def read_weights(
    path: Path, *, model: Architecture | None = None, weights: str = "auto"
) -> Weights:
    """Read and rename a file, or a folder of timm or transformers.

    model: the settings of the family timm for weights of such a model, which keep their names.
    weights: model, ema or auto, as `read_torch_file`; only files of training scripts have both.
    Raises UserError for what cannot be read or trusted, and where positions form no square.
    """
    timm_name = model.model if isinstance(model, TimmSettings) else None
    if weights == "ema" and (path.is_dir() or path.suffix in WITHOUT_AVERAGE):
        raise no_average(path)
    try:
        source = _read(path, timm_name, weights=weights)
    except UserError:
        raise
    except OSError as error:
        raise UserError(
            f"cannot be read ({error.strerror or error})", where=path
        ) from None
    # A JSON file beside the weights lacks a key, or has a value of another type.
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:
        raise UserError(
            f"the model's description is incomplete or invalid ({type(error).__name__}: {error})",
            where=path,
        ) from None

    if not source.tensors:
        raise UserError("contains no tensors", where=path)
    if source.known.get("name") == "timm":
        return replace(source, grid=(1, 1))

    tensors = names.with_representation(source.tensors)
    grid = source.grid
    if grid == NOT_STATED:
        grid = _square_grid(tensors, path)
    left_out = tuple(sorted(source.left_out))
    return replace(source, tensors=tensors, grid=grid, left_out=left_out)


def _read(path: Path, timm_name: str | None, *, weights: str) -> Weights:
    """Weights of a file or a folder, whose JSON files say who wrote it."""
    if not path.is_dir():
        source = _read_file(path, timm_name, weights=weights)
        return replace(source, classes=_classes_beside(path))
    if (path / DESCRIPTION).is_file():
        return _read_exported(path)

    # A folder of timm names its architecture; all others follow transformers.
    config = read_json(path / CONFIG)
    if "architecture" in config:
        return read_timm_folder(path, config, as_timm=timm_name is not None)
    return read_huggingface_folder(path, config)


def _read_file(path: Path, timm_name: str | None, *, weights: str) -> Weights:
    """Weights under their names in timm with `timm_name`, else under ours."""
    if path.suffix in WITHOUT_AVERAGE:
        # Google's files have more than the weights; timm's names have no such prefix.
        prefix_of = partial(_prefix, path=path) if timm_name is None else lambda _: ""
        file = TorchFile(read_tensors(path, prefix_of=prefix_of), {}, None)
    else:
        file = read_torch_file(path, weights=weights)
    source = _named(file, path, timm_name)
    if file.average is None:
        return source
    origin = f"{source.format}, the average of the weights ({file.average})"
    return replace(source, format=origin)


def _named(file: TorchFile, path: Path, timm_name: str | None) -> Weights:
    """Find out whose tensors these are, and rename them."""
    tensors = file.tensors
    arguments = file.arguments
    trained = arguments.get("model")
    is_known = isinstance(trained, str) and timm.is_model(trained)
    if is_known and timm_name in (None, trained):
        return read_timm_checkpoint(
            tensors,
            arguments,
            as_timm=timm_name is not None,
            where=f"{path}: args",
        )

    # The user says which model of timm it is, and the pixels are those of timm's own weights.
    if timm_name is not None:
        config = timm_model.pretrained_config(timm_name)
        return Weights(
            tensors=names.without_wrappers(tensors),
            format=f"timm's {timm_name}",
            known={
                "name": "timm",
                "model": timm_name,
                "image_size": config.input_size[-1],
            },
            preprocessing=pixels.timm_preprocessing(asdict(config), where=timm_name),
            positions="timm",
        )

    # An .npz may have our names, as an export writes them.
    has_our_names = any(name.endswith(names.FIRST_NAME) for name in tensors)
    if path.suffix == ".npz" and not has_our_names:
        tensors, num_heads = google.from_google(tensors)
        source = Weights(tensors=tensors, **GOOGLE)
        if num_heads is None:
            return source
        return replace(source, known={**source.known, "num_heads": num_heads})

    # The number of heads and the pixels are in a file beside the weights.
    for name in tensors:
        if "embeddings.patch_embeddings.projection" in name:
            next_step = f"put its {CONFIG} beside it"
            if (path.parent / CONFIG).is_file():
                next_step = f"set init={quote(str(path.parent))}"
            raise UserError(
                f"has Hugging Face's names, such as {name!r}; they need {CONFIG}",
                where=path,
                allowed="a folder with config.json and the weights",
                next_step=next_step,
            )

    tensors, left_out = names.from_pytorch(tensors)
    source = Weights(tensors=tensors, left_out=tuple(left_out), **PYTORCH)
    crop_ratio = arguments.get("eval_crop_ratio")  # of DeiT
    if crop_ratio:
        own_pixels = {**source.preprocessing, "eval_crop_fraction": float(crop_ratio)}
        source = replace(source, preprocessing=own_pixels)
    return source


def _classes_beside(path: Path) -> tuple[str, ...] | None:
    """The names in a list beside a file of weights, which has none itself."""
    listed = path.with_name(CLASSES_NAME)
    if not listed.is_file():
        return None
    content = json.loads(listed.read_text("utf-8"))
    classes = labels_in_order(content)
    # An object such as {"cat": 0} would be ignored otherwise. A list without names, such as
    # ["0", "1"], is one all the same.
    if classes is None and not isinstance(content, list):
        raise UserError(
            "is no list", where=listed, allowed="a JSON list of names by label"
        )
    return classes


def _prefix(stored: Collection[str], path: Path) -> str:
    """vit_jax stores weights bare, older files below `opt/target/`, big_vision below `params/`,
    beside a text tower below `params/img/`.
    """
    if any(name.endswith(names.FIRST_NAME) for name in stored):
        return ""

    # `opt/target/` has the optimiser's states beside it, which nobody needs here.
    for prefix in (
        "",
        "params/",
        "params/img/",
        "img/",
        "opt/target/",
        "optimizer/target/",
    ):
        if f"{prefix}{google.FIRST_NAME}" in stored:
            return prefix
    first = ", ".join(sorted(stored)[:3])
    raise UserError(
        f"contains no {google.FIRST_NAME!r}; its first names: {first}",
        where=path,
        allowed="weights of vision_transformer or big_vision",
    )


def _read_exported(folder: Path) -> Weights:
    """Weights and description of a folder that was exported here."""
    described = read_json(folder / DESCRIPTION)
    version = described["format_version"]
    known = dict(described["model"])
    rows, columns = map(int, described["grid"])
    stated = described["preprocessing"]
    preprocessing = {key: stated[key] for key in PREPROCESSING}
    for key in ("mean", "std"):
        preprocessing[key] = tuple(map(float, stated[key]))
    classes = described["classes"]
    if classes is not None:
        classes = tuple(map(str, classes))

    # A later version may mean something else by the same keys.
    if version != FORMAT_VERSION:
        raise UserError(
            f"format version {version!r} is unknown",
            where=folder / DESCRIPTION,
            allowed=str(FORMAT_VERSION),
        )

    path = file_beside(folder / DESCRIPTION, EXPORTED)
    timm_name = known["model"] if known.get("name") == "timm" else None
    source = _read_file(path, timm_name, weights="model")
    return replace(
        source,
        known=known,
        grid=(rows, columns),
        preprocessing=preprocessing,
        classes=classes,
        assumed=(),
        independent=bool(described.get("independent", False)),
        positions="google",
    )


def _square_grid(tensors: names.Tensors, path: Path) -> tuple[int, int]:
    """Infer the grid, which no file stores: at most one count of patches is a square.

    A distillation token always comes with positions of both tokens.
    """
    if "pos_embed" not in tensors:
        return (1, 1)
    num_rows = 0
    if tensors["pos_embed"].ndim == 3:
        num_rows = tensors["pos_embed"].shape[-2]

    # A class token has a position or none; the shape of the positions alone tells which.
    counts = [num_rows]
    if "dist_token" in tensors:
        counts = [num_rows - 2]
    elif "cls_token" in tensors:
        counts = [num_rows - 1, num_rows]

    # Positive numbers one apart are never both squares, so the first square decides.
    for num_patches in counts:
        side = math.isqrt(max(0, num_patches))
        if side and side * side == num_patches:
            return (side, side)
    raise UserError(
        f"the grid of its {num_rows} positions cannot be inferred: they form no square",
        where=path,
        next_step="give a folder of Hugging Face or timm, whose config.json has the image size",
    )
