"""Read external weights under our names: files and folders of other code bases.

Owns: which format a path has, its grid of positions, and what each format implies.
Leaves out: bytes (`files`), names (`names`), config.json (`folders`), the sizes of the model
(`inferred`), which tensors carry over (`transfer`).

Nothing is downloaded, and no file runs code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from vitscale.config.errors import UserError
from vitscale.models.interface.settings import ModelSettingsBase
from vitscale.models.timm_model import pretrained_config
from vitscale.models.timm_settings import TimmSettings
from vitscale.models.weights.files.suffixes import SUFFIXES
from vitscale.models.weights.files.tensors import (
    read_json,
    read_npz,
    read_safetensors,
    read_torch_file,
)
from vitscale.models.weights.folders.exported import DESCRIPTION, read_description
from vitscale.models.weights.folders.folder import CONFIG, Folder
from vitscale.models.weights.folders.huggingface import read_huggingface_folder
from vitscale.models.weights.folders.timm import read_timm_folder, timm_preprocessing
from vitscale.models.weights.names import google as google_names
from vitscale.models.weights.names import timm as timm_names

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


@dataclass(frozen=True, kw_only=True)
class ExternalWeights:
    """Tensors in fp32 under our names, heads included, and what their source says of the model."""

    weights: dict[str, torch.Tensor]
    grid: tuple[int, int]
    """(rows, columns) of the position embedding; (1, 1) where there is none."""
    format: str = ""
    """In words: whose names the tensors had."""
    known: Mapping[str, Any] = field(default_factory=dict)
    """Values of `model` that shapes do not show, such as the form of GELU."""
    preprocessing: Mapping[str, Any] = field(default_factory=dict)
    """Values of the evaluation's preprocessing, named as in `data`."""
    assumed: bool = True
    """Whether `known` and `preprocessing` are defaults of the format, not read from its source."""
    classes: tuple[str, ...] | None = None
    """Name of each class by label, where the source has them."""
    left_out: tuple[str, ...] = ()
    """Names of tensors that no model here has use for, such as DINO's training heads."""


def is_weight_file(path: str) -> bool:
    """Whether a path names a file of weights rather than a folder."""
    return Path(path).suffix in SUFFIXES


def is_external(path: str) -> bool:
    """Whether `init=` names weights of other code bases rather than a run or a checkpoint."""
    return is_weight_file(path) or any(
        (Path(path) / name).is_file() for name in (CONFIG, DESCRIPTION)
    )


def read_external_weights(
    path: Path, *, grid: tuple[int, int] | None, model: ModelSettingsBase | None = None
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
                folder = read_timm_folder(path, config, as_timm=timm_name is not None)
            else:
                folder = read_huggingface_folder(path, config)
            read = _of_folder(folder)
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})", where=str(path)) from None
    if not read.weights:
        raise UserError("holds no tensors", where=str(path))
    if read.known.get("name") == "timm":
        weights, grid = read.weights, (1, 1)
    else:
        weights = timm_names.with_representation(read.weights)
    return ExternalWeights(
        weights=weights,
        grid=grid or read.grid or _square_grid(weights, path),
        format=read.format,
        known=read.known,
        preprocessing=read.preprocessing,
        assumed=read.assumed,
        classes=read.classes,
        left_out=tuple(sorted(read.left_out)),
    )


@dataclass(frozen=True, kw_only=True)
class _Read:
    """As `ExternalWeights`, before the grid is known."""

    weights: dict[str, torch.Tensor]
    format: str
    known: Mapping[str, Any]
    preprocessing: Mapping[str, Any]
    left_out: list[str]
    assumed: bool = True
    classes: tuple[str, ...] | None = None
    grid: tuple[int, int] | None = None


def _of_folder(folder: Folder) -> _Read:
    return _Read(
        weights=folder.weights,
        format=folder.format,
        known=folder.known,
        preprocessing=folder.preprocessing,
        left_out=folder.left_out,
        assumed=False,
        classes=folder.classes,
        grid=folder.grid,
    )


def _read_exported(folder: Path) -> _Read:
    description, path = read_description(folder)
    if description.model.get("name") == "timm":
        read = _read_timm_file(path, description.model["model"])
    else:
        read = READERS.get(path.suffix, _read_pytorch)(path)
    return replace(
        read,
        known=description.model,
        preprocessing=description.preprocessing,
        assumed=False,
        classes=description.classes,
        grid=description.grid,
    )


def _read_pytorch(path: Path) -> _Read:
    return _with_pytorch_names(_read_tensors(path), path)


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".npz":
        return read_npz(path, prefix_of=lambda names: "")
    return read_safetensors(path) if path.suffix == ".safetensors" else read_torch_file(path)


def _read_timm_file(path: Path, name: str) -> _Read:
    """Weights of a model of timm under its names, and the pixels that timm's own weights expect."""
    config = pretrained_config(name)
    return _Read(
        weights=_read_tensors(path),
        format=f"timm's {name}",
        known={"name": "timm", "model": name, "image_size": config.input_size[-1]},
        preprocessing=timm_preprocessing(asdict(config), where=name),
        left_out=[],
    )


def _with_pytorch_names(found: dict[str, torch.Tensor], path: Path) -> _Read:
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
    return _Read(
        weights=weights,
        format="timm's names",
        known=known,
        preprocessing=preprocessing,
        left_out=left_out,
    )


def _read_npz(path: Path) -> _Read:
    found = read_npz(path, prefix_of=lambda names: _prefix(names, path))
    if any(name.endswith(TIMM_NAME) for name in found):
        return _with_pytorch_names(found, path)
    known, preprocessing = GOOGLE_DEFAULTS
    heads = google_names.heads_of(found)
    return _Read(
        weights=google_names.renamed(found),
        format="Google's names",
        known=known if heads is None else {**known, "num_heads": heads},
        preprocessing=preprocessing,
        left_out=[],
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


READERS: dict[str, Callable[[Path], _Read]] = {".npz": _read_npz}
