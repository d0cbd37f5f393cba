"""Weights, and files of them. No code of a file runs.

Every function raises UserError for files that are damaged or hold something else, and OSError.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import pickle
import re
import zipfile
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch.serialization import safe_globals

from vitscale.config.errors import UserError
from vitscale.config.packed_files import check_expansion

SUFFIXES = (".npz", ".safetensors", ".pth", ".pt", ".bin", ".tar")
CONFIG = "config.json"
# Names of the classes by label, a JSON list, in a run folder or beside a file of weights.
CLASSES_NAME = "classes.json"
FOLDER_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
)
NOT_STATED = (0, 0)
# Where training scripts put the weights. MAE, DeiT: `model`; timm: `state_dict`; DINO: `teacher`.
WEIGHT_KEYS = ("model", "state_dict", "teacher")
# Where they put the average of the weights: timm, then DeiT and MAE.
AVERAGE_KEYS = ("state_dict_ema", "model_ema")
# torch.compile puts it into the names of the weights that it wraps.
COMPILED = "_orig_mod."
# Types of `args` in the files of timm, MAE and DeiT.
EXTRA_TYPES: list[Any] = [argparse.Namespace, pathlib.PosixPath]
# bfloat16 as numpy stores unknown types: big_vision, utils.py, `recover_dtype`.
BFLOAT16 = np.dtype("V2")
# Loaders raise these for files that are cut, changed or something else.
DAMAGE = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    EOFError,
    RuntimeError,
    MemoryError,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    zlib.error,
    SafetensorError,
)
# Names that stand for none: of transformers, of our exports, and of numbers as texts.
PLACEHOLDERS = ("LABEL_{}", "class {}", "{}")
REFUSED = re.compile(
    r"[Uu]nsupported (?:global|GLOBAL|class|operand).*?(?= was not| whose|$)"
)


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Tensors in fp32 under our names, heads included, and what their source says of the model."""

    tensors: dict[str, torch.Tensor]
    grid: tuple[int, int] = NOT_STATED
    """(rows, columns) of the position embedding; (1, 1) where there is none."""
    format: str = ""
    """Origin of the tensors' names, such as `timm's names`."""
    known: Mapping[str, Any] = field(default_factory=dict)
    """Values of `model` that shapes do not show, such as the form of GELU."""
    preprocessing: Mapping[str, Any] = field(default_factory=dict)
    """Values of the evaluation's preprocessing, named as in `data`."""
    assumed: Collection[str] | None = None
    """Keys of both that are defaults of the format, not read from the source. None: all of them."""
    classes: tuple[str, ...] | None = None
    """Name of each class by label, where the source has them."""
    independent: bool = False
    """True if each output is a probability of its own, as a sigmoid loss trains them."""
    positions: str = "google"
    """How the source's library resamples positions; see `models.positions`."""
    left_out: tuple[str, ...] = ()
    """Names of tensors that no model here has use for, such as DINO's training heads."""
    computed: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Fixed positions, which are in no file; for models that learn them."""
    where: str = ""
    """The path, for errors."""

    def assumes(self, key: str) -> bool:
        return self.assumed is None or key in self.assumed

    def names_of(self, num_outputs: int) -> tuple[str, ...] | None:
        """Name of each output of the head, where the source has them.

        Raises UserError where it names more outputs or fewer: then none of them is certain.
        """
        if not num_outputs:
            return None
        if self.classes is None or len(self.classes) == num_outputs:
            return self.classes
        raise UserError(
            f"{len(self.classes):,} names of classes for the model's {num_outputs:,} outputs",
            where=self.where,
            next_step="correct or remove the names, in classes.json or the folder's config.json",
        )


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"is not JSON ({error})", where=path) from None
    if not isinstance(content, dict):
        raise UserError("contains no JSON object", where=path)
    return content


def read_tensors(
    path: Path, *, prefix_of: Callable[[Collection[str]], str] = lambda names: ""
) -> dict[str, torch.Tensor]:
    """All tensors of a file, or of all files that an index lists, in fp32 under their own names.

    prefix_of: chooses a prefix from the names in an .npz, which is removed; what is beside it, such
    as optimiser states, is not read.
    """
    try:
        if path.suffix == ".json":  # model.safetensors.index.json
            tensors: dict[str, torch.Tensor] = {}
            # Only names beside the index: a path in it could lead anywhere.
            for name in sorted(set(read_json(path).get("weight_map", {}).values())):
                tensors |= read_tensors(path.parent / Path(name).name)
            return tensors

        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                return {
                    name.replace(COMPILED, ""): file.get_tensor(name).float()
                    for name in file.keys()
                }

        if path.suffix == ".npz":
            _refuse_bomb(path)
            with np.load(path, allow_pickle=False) as arrays:
                prefix = prefix_of(arrays.files)
                return {
                    name.removeprefix(prefix): _in_fp32(arrays[name])
                    for name in arrays.files
                    if name.startswith(prefix)
                }
    except DAMAGE as error:
        raise _refused(error, path) from None
    return read_torch_file(path).tensors


class TorchFile(NamedTuple):
    """Contents of a file of `torch.save`."""

    tensors: dict[str, torch.Tensor]
    arguments: Mapping[str, Any]
    """Of the command that trained the weights, as timm, DeiT and MAE store them; plain values."""
    average: str | None
    """The key of the average, if that was taken."""


def read_torch_file(path: Path, *, weights: str = "model") -> TorchFile:
    """Read tensors, also below one of `WEIGHT_KEYS` or, as `weights` says, `AVERAGE_KEYS`.

    weights: model; ema: their average over training; auto: the average if there is one.
    """
    try:
        _refuse_bomb(path)
        with safe_globals(EXTRA_TYPES):
            content = torch.load(path, map_location="cpu", weights_only=True)
        return _torch_file(content, path, weights=weights)
    except DAMAGE as error:
        raise _refused(error, path) from None


def _refuse_bomb(path: Path) -> None:
    """Raise UserError for a zip whose members unpack to far more than the file."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as file:
            content_bytes = sum(member.file_size for member in file.infolist())
        check_expansion(content_bytes, file_bytes=path.stat().st_size, where=str(path))


def _torch_file(content: Any, path: Path, *, weights: str) -> TorchFile:
    # A training script saves the weights beside its own state, an export the weights alone.
    outer = content if isinstance(content, Mapping) else {}
    keys: tuple[str, ...] = WEIGHT_KEYS
    if weights != "model":
        keys = (*AVERAGE_KEYS, *WEIGHT_KEYS)
    average = None
    for key in keys:
        if isinstance(outer.get(key), Mapping):
            content = outer[key]
            if key in AVERAGE_KEYS:
                average = key
            break
    if weights == "ema" and average is None:
        raise no_average(path)

    if not isinstance(content, Mapping):
        raise UserError("contains no named tensors", where=path)
    for name, value in content.items():
        if not isinstance(value, torch.Tensor):
            raise UserError(
                f"{name!r} is not a tensor",
                where=path,
                allowed=f"tensors by name, also below one of {', '.join(WEIGHT_KEYS)}",
            )

    # A view may repeat a few stored bytes without end.
    num_bytes = sum(value.numel() * value.element_size() for value in content.values())
    check_expansion(num_bytes, file_bytes=path.stat().st_size, where=str(path))
    tensors = {
        str(name).replace(COMPILED, ""): value.detach().float()
        for name, value in content.items()
    }

    # A namespace holds values only: its type was made by the reader, not by the file.
    arguments: Mapping[str, Any] = {}
    if isinstance(outer.get("args"), argparse.Namespace):
        arguments = vars(outer["args"])
    return TorchFile(tensors, arguments, average)


def no_average(path: Path) -> UserError:
    return UserError(
        "contains no averaged weights",
        where=path,
        allowed="init_weights: auto, model",
        next_step="set init_weights=auto",
    )


def _in_fp32(array: np.ndarray) -> torch.Tensor:
    # NumPy has no such type; only the bits are kept.
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).float()
    return torch.from_numpy(array.astype(np.float32, order="C"))


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors beside a config.json, under their own names."""
    return read_tensors(file_beside(folder / CONFIG, FOLDER_FILES))


def file_beside(described: Path, names: Collection[str]) -> Path:
    """The first of the files `names` beside a description of them."""
    # A folder may have the same weights twice, and safetensors are preferred.
    for path in map(described.with_name, names):
        if path.is_file():
            return path
    raise UserError(
        f"has {described.name}, but no weights",
        where=described.parent,
        allowed=", ".join(names),
        next_step="copy the whole folder, or export it with --to safetensors",
    )


def labels_in_order(names: Any) -> tuple[str, ...] | None:
    """Names by label, of a list or an object; None for placeholders and for gaps."""
    if isinstance(names, list):
        names = {str(label): name for label, name in enumerate(names)}
    if not isinstance(names, dict):
        return None
    labels = [str(label) for label in range(len(names))]
    if set(names) != set(labels):
        return None
    in_order = tuple(str(names[label]) for label in labels)

    # Placeholders would be matched with other placeholders by their number.
    for placeholder in PLACEHOLDERS:
        if in_order == tuple(placeholder.format(label) for label in labels):
            return None
    return in_order


def _refused(error: Exception, path: Path) -> UserError:
    if isinstance(error, UserError):
        return error
    text = str(error)
    refusal = REFUSED.search(text)
    if refusal:
        return UserError(
            f"could run code, so nothing was loaded ({refusal[0]})",
            where=path,
            allowed="tensors, numbers, texts, argparse.Namespace and pathlib.PosixPath",
            next_step="ask for the weights alone, preferably as .safetensors",
        )
    # The first sentence: torch adds advice to switch its checks off.
    reason = (text.splitlines() or [type(error).__name__])[0].split(". ")[0]
    return UserError(
        f"is damaged or not a weights file ({reason})",
        where=path,
        next_step="download it again, or save the weights as .safetensors",
    )
