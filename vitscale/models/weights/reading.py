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
# What a file does not say, by format. Google: vision_transformer, models_vit.py. PyTorch: the
# defaults of timm's models and of MAE, DeiT and DINOv2.
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
        if not path.is_dir():
            found = _read_file(path, timm_name, weights=weights)
            found = replace(found, classes=_classes_beside(path))
        elif (path / DESCRIPTION).is_file():
            found = _read_exported(path)
        elif "architecture" in (config := read_json(path / CONFIG)):
            found = read_timm_folder(path, config, as_timm=timm_name is not None)
        else:
            found = read_huggingface_folder(path, config)
    except UserError:
        raise
    except OSError as error:
        raise UserError(
            f"cannot be read ({error.strerror or error})", where=str(path)
        ) from None
    # A JSON file beside the weights lacks a key, or has a value of another type.
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:
        what = f"the model's description is incomplete or invalid ({type(error).__name__}: {error})"
        raise UserError(what, where=str(path)) from None
    if not found.tensors:
        raise UserError("contains no tensors", where=str(path))
    if found.known.get("name") == "timm":
        return replace(found, grid=(1, 1))
    tensors = names.with_representation(found.tensors)
    grid = _square_grid(tensors, path) if found.grid == NOT_STATED else found.grid
    return replace(
        found, tensors=tensors, grid=grid, left_out=tuple(sorted(found.left_out))
    )


def _read_file(path: Path, timm_name: str | None, *, weights: str) -> Weights:
    """Weights under their names in timm with `timm_name`, else under ours."""
    if path.suffix in WITHOUT_AVERAGE:
        prefix_of = (lambda names: "") if timm_name else partial(_prefix, path=path)
        file = TorchFile(read_tensors(path, prefix_of=prefix_of), {}, None)
    else:
        file = read_torch_file(path, weights=weights)
    found = _named(file, path, timm_name)
    average = f", the average of the weights ({file.average})" if file.average else ""
    return replace(found, format=f"{found.format}{average}")


def _named(file: TorchFile, path: Path, timm_name: str | None) -> Weights:
    """Find out whose tensors these are, and rename them."""
    tensors, arguments = file.tensors, file.arguments
    trained = arguments.get("model")
    if (
        isinstance(trained, str)
        and timm.is_model(trained)
        and timm_name in (None, trained)
    ):
        as_timm = timm_name is not None
        return read_timm_checkpoint(
            tensors, arguments, as_timm=as_timm, where=f"{path}: args"
        )
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
            # The pixels that timm's own weights expect.
            preprocessing=pixels.timm_preprocessing(asdict(config), where=timm_name),
            positions="timm",
        )
    if path.suffix == ".npz" and not any(
        name.endswith(names.FIRST_NAME) for name in tensors
    ):
        tensors, num_heads = google.from_google(tensors)
        found = Weights(tensors=tensors, **GOOGLE)
        heads = {} if num_heads is None else {"num_heads": num_heads}
        return replace(found, known={**found.known, **heads})
    theirs = [
        name for name in tensors if "embeddings.patch_embeddings.projection" in name
    ]
    if theirs:
        has_config = (path.parent / CONFIG).is_file()
        raise UserError(
            f"has Hugging Face's names, such as {theirs[0]!r}; they need {CONFIG}",
            where=str(path),
            allowed="a folder with config.json and the weights",
            next_step=f"set init={quote(str(path.parent))}"
            if has_config
            else f"put its {CONFIG} beside it",
        )
    tensors, left_out = names.from_pytorch(tensors)
    found = Weights(tensors=tensors, left_out=tuple(left_out), **PYTORCH)
    if ratio := arguments.get("eval_crop_ratio"):  # of DeiT
        how = {**found.preprocessing, "eval_crop_fraction": float(ratio)}
        found = replace(found, preprocessing=how)
    return found


def _classes_beside(path: Path) -> tuple[str, ...] | None:
    """The names in a list beside a file of weights, which has none itself."""
    listed = path.with_name(CLASSES_NAME)
    if not listed.is_file():
        return None
    content = json.loads(listed.read_text("utf-8"))
    names = labels_in_order(content)
    # Such as {"cat": 0}. A list without names, such as ["0", "1"], is one all the same.
    if names is None and not isinstance(content, list):
        raise UserError(
            "is no list", where=str(listed), allowed="a JSON list of names by label"
        )
    return names


def _prefix(stored: Collection[str], path: Path) -> str:
    """vit_jax stores weights bare, older files below `opt/target/`, big_vision below `params/`,
    beside a text tower below `params/img/`.
    """
    if any(name.endswith(names.FIRST_NAME) for name in stored):
        return ""
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
    what = f"contains no {google.FIRST_NAME!r}; its first names: {', '.join(sorted(stored)[:3])}"
    raise UserError(
        what, where=str(path), allowed="weights of vision_transformer or big_vision"
    )


def _read_exported(folder: Path) -> Weights:
    """Weights and description of a folder that was exported here."""
    described = read_json(folder / DESCRIPTION)
    version, known = described["format_version"], dict(described["model"])
    rows, columns = map(int, described["grid"])
    how, classes = described["preprocessing"], described["classes"]
    preprocessing = {key: how[key] for key in PREPROCESSING}
    preprocessing |= {key: tuple(map(float, how[key])) for key in ("mean", "std")}
    classes = None if classes is None else tuple(map(str, classes))
    if version != FORMAT_VERSION:
        what = f"format version {version!r} is unknown"
        where = str(folder / DESCRIPTION)
        raise UserError(what, where=where, allowed=str(FORMAT_VERSION))
    path = file_beside(folder / DESCRIPTION, EXPORTED)
    timm_name = known["model"] if known.get("name") == "timm" else None
    found = _read_file(path, timm_name, weights="model")
    return replace(
        found,
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
    num_rows = tensors["pos_embed"].shape[-2] if tensors["pos_embed"].ndim == 3 else 0
    counts = (num_rows - 1, num_rows) if "cls_token" in tensors else (num_rows,)
    for num_patches in (num_rows - 2,) if "dist_token" in tensors else counts:
        side = math.isqrt(max(0, num_patches))
        if side and side * side == num_patches:
            return (side, side)
    raise UserError(
        f"the grid of its {num_rows} positions cannot be inferred: they form no square",
        where=str(path),
        next_step="give a folder of Hugging Face or timm, whose config.json has the image size",
    )
