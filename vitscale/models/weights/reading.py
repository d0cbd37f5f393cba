"""Read external weights under our names: Google's .npz and timm's .safetensors.

Owns: reading an untrusted file, and its grid of positions.
Leaves out: Google's names (`google_names`), which tensors carry over and how the grid is resampled
(`transfer`).

Nothing is unpickled: object arrays are refused by their header. A file declares the
sizes of its arrays, so they are checked before memory is allocated.
"""

from __future__ import annotations

import math
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from vitscale.config.errors import UserError
from vitscale.models.weights.google_names import FIRST_NAMES, renamed

# G/14, the largest published, has 7.4 GB in fp32.
MAX_BYTES = 16 * 2**30
# Trained weights hardly compress; zero heads do. Small files may: they cannot exhaust memory.
MAX_COMPRESSION, FREE_BYTES = 20, 64 * 2**20
MAX_MEMBERS = 20_000
TIMM_NAME = "patch_embed.proj.weight"
FLOATS = ("f2", "f4", "f8")
# bfloat16 as numpy stores unknown types: big_vision, utils.py, `recover_dtype`.
BFLOAT16 = "V2"
NPY_HEADERS: dict[tuple[int, int], Callable[..., Any]] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


@dataclass(frozen=True, kw_only=True)
class ExternalWeights:
    """Tensors in fp32 under our names, heads included."""

    weights: dict[str, torch.Tensor]
    grid: tuple[int, int]
    """(rows, columns) of the position embedding; (1, 1) where there is none."""


def is_weight_file(path: str) -> bool:
    """Whether `init=` names such a file rather than a run or a checkpoint."""
    return Path(path).suffix in READERS


def read_external_weights(path: Path, *, grid: tuple[int, int] | None) -> ExternalWeights:
    """Read and rename.

    grid: of the position embedding; None: inferred where the patches form a square.
    Raises UserError for files that cannot be read or trusted, and where the grid must be given.
    """
    try:
        found = READERS[path.suffix](path)
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})", where=str(path)) from None
    if not found:
        raise UserError("holds no tensors", where=str(path))
    return ExternalWeights(weights=found, grid=grid or _square_grid(found, path))


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


# ---- safetensors with timm's names ------------------------------------------------------------


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    if os.stat(path).st_size > MAX_BYTES:
        raise UserError(f"is larger than {MAX_BYTES:,} bytes", where=str(path))
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_tensor(name).float() for name in file.keys()}
    except SafetensorError as error:
        raise UserError(f"is not a safetensors file ({error})", where=str(path)) from None
    return _timm_names(found)


def _timm_names(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Names of timm, also below `model.`, as in MAE's files."""
    if all(name.startswith("model.") for name in found):
        found = {name.removeprefix("model."): value for name, value in found.items()}
    # Layers before the head, in timm's older files; dropped with it.
    found = {re.sub(r"^pre_logits\.", "head.pre_logits.", k): value for k, value in found.items()}
    # DeiT's own names (models_v2.py) of what timm calls layer scale.
    rename = {"gamma_1": "ls1.gamma", "gamma_2": "ls2.gamma"}
    return {
        re.sub(r"(?<=\.)gamma_[12]$", lambda m: rename[m[0]], name): value
        for name, value in found.items()
    }


# ---- .npz with Google's names, or with timm's ---------------------------------------------------


def _read_npz(path: Path) -> dict[str, torch.Tensor]:
    try:
        with zipfile.ZipFile(path) as archive:
            members = _trusted_members(archive, path)
            is_timm = any(name.endswith(TIMM_NAME) for name in members)
            prefix = "" if is_timm else _prefix(members, path)
            # Optimiser states and counters beside the weights are not read.
            tensors = {
                name.removeprefix(prefix): _tensor(archive, info, path)
                for name, info in members.items()
                if name.startswith(prefix)
            }
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise UserError(f"is not a whole .npz file ({error})", where=str(path)) from None
    return _timm_names(tensors) if is_timm else renamed(tensors)


def _trusted_members(archive: zipfile.ZipFile, path: Path) -> dict[str, zipfile.ZipInfo]:
    infos = archive.infolist()
    total = sum(info.file_size for info in infos)
    most = min(MAX_BYTES, max(FREE_BYTES, MAX_COMPRESSION * os.stat(path).st_size))
    if len(infos) > MAX_MEMBERS or total > most:
        what = f"would unpack to {len(infos):,} arrays of {total:,} bytes"
        allowed = f"{MAX_MEMBERS:,} arrays, {most:,} bytes for a file of this size"
        raise UserError(what, where=str(path), allowed=allowed)
    encrypted = [info.filename for info in infos if info.flag_bits & 1]
    if encrypted:
        raise UserError(f"{encrypted[0]!r} is encrypted", where=str(path))
    return {info.filename.removesuffix(".npy"): info for info in infos}


def _prefix(names: Mapping[str, object], path: Path) -> str:
    """vit_jax stores weights bare, big_vision below `params/`, older files below `opt/target/`."""
    for prefix in ("", "params/", "opt/target/", "optimizer/target/"):
        if any(f"{prefix}{name}" in names for name in FIRST_NAMES):
            return prefix
    raise UserError(
        f"holds no {' or '.join(map(repr, FIRST_NAMES))}; its first names: "
        f"{', '.join(sorted(names)[:3])}",
        where=str(path),
        allowed="weights of vision_transformer, big_vision or big_transfer",
    )


def _tensor(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path) -> torch.Tensor:
    """One array in fp32; its header is checked against its size before it is read."""
    with archive.open(info) as file:
        shape, fortran, dtype = _header(file, info, path)
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes != info.file_size - file.tell():
            what = f"{info.filename!r} declares {num_bytes:,} bytes, but holds another number"
            raise UserError(what, where=str(path))
        flat = np.frombuffer(bytearray(file.read(num_bytes)), dtype=dtype)
    array = flat.reshape(shape, order="F" if fortran else "C")
    if dtype.str[1:] == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).float()
    return torch.from_numpy(array.astype(np.float32))


def _header(
    file: IO[bytes], info: zipfile.ZipInfo, path: Path
) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    try:
        shape, fortran, dtype = NPY_HEADERS[np.lib.format.read_magic(file)](file)
    except (ValueError, KeyError) as error:
        what = f"{info.filename!r} is not a numpy array ({error})"
        raise UserError(what, where=str(path)) from None
    if dtype.hasobject or dtype.str[1:] not in (*FLOATS, BFLOAT16):
        what = "Python objects, which are never loaded" if dtype.hasobject else str(dtype)
        raise UserError(f"{info.filename!r} holds {what}", where=str(path), allowed="floats")
    return shape, fortran, dtype


READERS: dict[str, Callable[[Path], dict[str, torch.Tensor]]] = {
    ".npz": _read_npz,
    ".safetensors": _read_safetensors,
}
