"""Read external weights under our names: files and folders of other code bases.

Owns: which format a path has, its grid of positions, and what each format implies.
Leaves out: bytes (`files`), names (`names`), config.json (`*_folder`), the sizes of the model
(`inferred`), which tensors carry over (`transfer`).

Nothing is downloaded, and no file runs code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from vitscale.config.errors import UserError
from vitscale.models.settings import Architecture, TimmSettings
from vitscale.models.timm_model import pretrained_config
from vitscale.models.weights.exported import DESCRIPTION, read_description
from vitscale.models.weights.external import NOT_STATED, ExternalWeights
from vitscale.models.weights.files import (
    read_json,
    read_npz,
    read_safetensors,
    read_torch_file,
)
from vitscale.models.weights.folder import CONFIG
from vitscale.models.weights.huggingface_folder import read_huggingface_folder
from vitscale.models.weights.names import google as google_names
from vitscale.models.weights.names import timm as timm_names
from vitscale.models.weights.suffixes import SUFFIXES
from vitscale.models.weights.timm_folder import read_timm_folder, timm_preprocessing

TIMM_NAME = timm_names.FIRST_NAME
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# What a file does not say, by format: values of `model` and of `data`. Google: vision_transformer,
# models_vit.py and input_pipeline.py. PyTorch: the defaults of timm's models and of MAE, DeiT and
# DINOv2, which evaluate on the centre of bicubically resized images.
GOOGLE_DEFAULTS: tuple[dict[str, Any], dict[str, Any]] = (
    {"gelu": "tanh", "layer_norm_eps": 1e-6},
    {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5), "eval_resize": "squash"},
)
PYTORCH_DEFAULTS: tuple[dict[str, Any], dict[str, Any]] = (
    {"gelu": "erf", "layer_norm_eps": 1e-6},
    {
        "mean": IMAGENET_MEAN,
        "std": IMAGENET_STD,
        "eval_resize": "center_crop",
        "eval_crop_fraction": 0.875,
        "eval_interpolation": "bicubic",
    },
)


def is_weight_file(path: str) -> bool:
    """Whether a path names a file of weights rather than a folder."""
    return Path(path).suffix in SUFFIXES


def is_external(path: str) -> bool:
    """Whether `init=` names weights of other code bases rather than a run or a checkpoint."""
    return is_weight_file(path) or any(
        (Path(path) / name).is_file() for name in (CONFIG, DESCRIPTION)
    )


def read_external_weights(
    path: Path, *, grid: tuple[int, int] | None, model: Architecture | None = None
) -> ExternalWeights:
    """Read and rename a file, or a folder of timm or transformers.

    grid: of the position embedding; None: inferred where the patches form a square. model: the
    settings of the family timm for weights of such a model, which keep their names.
    Raises UserError for what cannot be read or trusted, and where the grid must be given.
    """
    timm_name = model.model if isinstance(model, TimmSettings) else None
    try:
        if is_weight_file(str(path)) and timm_name is not None:
            read = _read_timm_file(path, timm_name)
        elif is_weight_file(str(path)):
            read = READERS.get(path.suffix, _read_pytorch)(path)
        elif (path / DESCRIPTION).is_file():
            read = _read_exported(path)
        else:
            config = read_json(path / CONFIG)
            if "architecture" in config:
                read = read_timm_folder(path, config, as_timm=timm_name is not None)
            else:
                read = read_huggingface_folder(path, config)
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})", where=str(path)) from None
    if not read.weights:
        raise UserError("holds no tensors", where=str(path))
    if read.known.get("name") == "timm":
        return replace(read, grid=(1, 1))
    weights = timm_names.with_representation(read.weights)
    if grid is None:
        grid = _square_grid(weights, path) if read.grid == NOT_STATED else read.grid
    return replace(read, weights=weights, grid=grid, left_out=tuple(sorted(read.left_out)))


def _read_exported(folder: Path) -> ExternalWeights:
    described, path = read_description(folder)
    if described["known"].get("name") == "timm":
        read = _read_timm_file(path, described["known"]["model"])
    else:
        read = READERS.get(path.suffix, _read_pytorch)(path)
    return replace(read, **described, assumed=False)


def _read_pytorch(path: Path) -> ExternalWeights:
    return _with_pytorch_names(_read_tensors(path), path)


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".npz":
        return read_npz(path, prefix_of=lambda names: "")
    return read_safetensors(path) if path.suffix == ".safetensors" else read_torch_file(path)


def _read_timm_file(path: Path, name: str) -> ExternalWeights:
    """Weights of a model of timm under its names, and the pixels that timm's own weights expect."""
    config = pretrained_config(name)
    return ExternalWeights(
        weights=_read_tensors(path),
        format=f"timm's {name}",
        known={"name": "timm", "model": name, "image_size": config.input_size[-1]},
        preprocessing=timm_preprocessing(asdict(config), where=name),
    )


def _with_pytorch_names(found: dict[str, torch.Tensor], path: Path) -> ExternalWeights:
    theirs = [name for name in found if "embeddings.patch_embeddings.projection" in name]
    if theirs:
        beside = path.parent / CONFIG
        next_step = f"set init={path.parent}" if beside.is_file() else f"put its {CONFIG} beside it"
        raise UserError(
            f"has Hugging Face's names, such as {theirs[0]!r}; they need {CONFIG}",
            where=str(path),
            allowed="a folder with config.json and the weights",
            next_step=next_step,
        )
    weights, left_out = timm_names.from_pytorch(found)
    known, preprocessing = PYTORCH_DEFAULTS
    return ExternalWeights(
        weights=weights,
        format="timm's names",
        known=known,
        preprocessing=preprocessing,
        left_out=tuple(left_out),
    )


def _read_npz(path: Path) -> ExternalWeights:
    found = read_npz(path, prefix_of=lambda names: _prefix(names, path))
    if any(name.endswith(TIMM_NAME) for name in found):
        return _with_pytorch_names(found, path)
    known, preprocessing = GOOGLE_DEFAULTS
    heads = google_names.heads_of(found)
    return ExternalWeights(
        weights=google_names.renamed(found),
        format="Google's names",
        known=known if heads is None else {**known, "num_heads": heads},
        preprocessing=preprocessing,
    )


def _prefix(names: Iterable[str], path: Path) -> str:
    """vit_jax stores weights bare, older files below `opt/target/`, big_vision below `params/`,
    beside a text tower below `params/img/`.
    """
    if any(name.endswith(TIMM_NAME) for name in names):
        return ""
    first = google_names.FIRST_NAME
    for prefix in ("", "params/", "params/img/", "img/", "opt/target/", "optimizer/target/"):
        if f"{prefix}{first}" in names:
            return prefix
    raise UserError(
        f"holds no {first!r}; its first names: {', '.join(sorted(names)[:3])}",
        where=str(path),
        allowed="weights of vision_transformer or big_vision",
    )


def _square_grid(weights: Mapping[str, torch.Tensor], path: Path) -> tuple[int, int]:
    """No file stores the grid. With and without the class token, at most one count is a square.

    A distillation token always comes with positions of both tokens.
    """
    if "pos_embed" not in weights:
        return (1, 1)
    num_rows = weights["pos_embed"].shape[-2] if weights["pos_embed"].ndim == 3 else 0
    counts = (num_rows - 1, num_rows) if "cls_token" in weights else (num_rows,)
    for num_patches in (num_rows - 2,) if "dist_token" in weights else counts:
        side = math.isqrt(max(0, num_patches))
        if side and side * side == num_patches:
            return (side, side)
    raise UserError(
        f"the grid of its {num_rows} positions cannot be inferred: they form no square",
        where=str(path),
        next_step="give it: init_grid='[ROWS, COLUMNS]'",
    )


READERS: dict[str, Callable[[Path], ExternalWeights]] = {".npz": _read_npz}
