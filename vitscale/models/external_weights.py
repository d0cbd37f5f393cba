"""Read external weights under our names: Google's .npz and timm's .safetensors.

Owns: reading an untrusted file, its names, and its grid of positions.
Leaves out: which tensors carry over and how the grid is resampled (`transfer`).

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

# G/14, the largest published, has 7.4 GB in fp32.
MAX_BYTES = 16 * 2**30
# Trained weights hardly compress; zero heads do. Small files may: they cannot exhaust memory.
MAX_COMPRESSION, FREE_BYTES = 20, 64 * 2**20
MAX_MEMBERS = 20_000
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
    # Layers before the head, in timm's older files; dropped with it.
    found = {re.sub(r"^pre_logits\.", "head.pre_logits.", k): value for k, value in found.items()}
    # DeiT's own names (models_v2.py) of what timm calls layer scale.
    rename = {"gamma_1": "ls1.gamma", "gamma_2": "ls2.gamma"}
    return {
        re.sub(r"(?<=\.)gamma_[12]$", lambda m: rename[m[0]], name): value
        for name, value in found.items()
    }


# ---- .npz with Google's names -----------------------------------------------------------------


def _read_npz(path: Path) -> dict[str, torch.Tensor]:
    try:
        with zipfile.ZipFile(path) as archive:
            members = _trusted_members(archive, path)
            prefix = _prefix(members, path)
            # Optimiser states and counters beside the weights are not read.
            tensors = {
                name.removeprefix(prefix): _tensor(archive, info, path)
                for name, info in members.items()
                if name.startswith(prefix)
            }
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise UserError(f"is not a whole .npz file ({error})", where=str(path)) from None
    return _renamed(tensors)


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
        if f"{prefix}embedding/kernel" in names:
            return prefix
    raise UserError(
        f"holds no 'embedding/kernel'; its first names: {', '.join(sorted(names)[:3])}",
        where=str(path),
        allowed="weights of vision_transformer or big_vision",
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


# Patterns over names of vit_jax and big_vision, which number the modules of a block differently.
# (pattern, our name, dimensions, how a kernel is turned)
_BLOCK = r"Transformer/encoderblock_(\d+)/"
_ATTENTION = _BLOCK + r"MultiHeadDotProductAttention_[01]/"


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _transposed(x: torch.Tensor) -> torch.Tensor:
    return x.T


NAMES: tuple[tuple[str, str, int, Callable[[torch.Tensor], torch.Tensor]], ...] = (
    (r"cls", "cls_token", 3, _same),
    (r"(?:Transformer/)?(?:posembed_input/)?pos_embedding", "pos_embed", 3, _same),
    (r"embedding/kernel", "patch_embed.proj.weight", 4, lambda x: x.permute(3, 2, 0, 1)),
    (r"embedding/bias", "patch_embed.proj.bias", 1, _same),
    (r"Transformer/encoder_norm/scale", "norm.weight", 1, _same),
    (r"Transformer/encoder_norm/bias", "norm.bias", 1, _same),
    (_BLOCK + r"LayerNorm_0/scale", r"blocks.\1.norm1.weight", 1, _same),
    (_BLOCK + r"LayerNorm_0/bias", r"blocks.\1.norm1.bias", 1, _same),
    (_BLOCK + r"LayerNorm_[12]/scale", r"blocks.\1.norm2.weight", 1, _same),
    (_BLOCK + r"LayerNorm_[12]/bias", r"blocks.\1.norm2.bias", 1, _same),
    # [width, heads, width / heads] each; joined to one below.
    (
        _ATTENTION + r"(query|key|value)/kernel",
        r"blocks.\1.attn.\2.weight",
        3,
        lambda x: x.flatten(1).T,
    ),
    (_ATTENTION + r"(query|key|value)/bias", r"blocks.\1.attn.\2.bias", 2, torch.flatten),
    (
        _ATTENTION + r"out/kernel",
        r"blocks.\1.attn.proj.weight",
        3,
        lambda x: x.flatten(0, 1).T,
    ),
    (_ATTENTION + r"out/bias", r"blocks.\1.attn.proj.bias", 1, _same),
    (_BLOCK + r"MlpBlock_[03]/Dense_0/kernel", r"blocks.\1.mlp.fc1.weight", 2, _transposed),
    (_BLOCK + r"MlpBlock_[03]/Dense_0/bias", r"blocks.\1.mlp.fc1.bias", 1, _same),
    (_BLOCK + r"MlpBlock_[03]/Dense_1/kernel", r"blocks.\1.mlp.fc2.weight", 2, _transposed),
    (_BLOCK + r"MlpBlock_[03]/Dense_1/bias", r"blocks.\1.mlp.fc2.bias", 1, _same),
    # Both layers of a head are left out of every transfer; see `transfer`.
    (r"pre_logits/kernel", "head.pre_logits.weight", 2, _transposed),
    (r"pre_logits/bias", "head.pre_logits.bias", 1, _same),
    (r"head/kernel", "head.weight", 2, _transposed),
    (r"head/bias", "head.bias", 1, _same),
)


def _renamed(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Under our names; what has none keeps its own, for the table of what does not fit."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        for pattern, ours, num_dims, turn in NAMES:
            match = re.fullmatch(pattern, name)
            if match is not None and tensor.ndim == num_dims:
                found[match.expand(ours)] = turn(tensor).contiguous()
                break
        else:
            found[name] = tensor
    return _with_joined_qkv(found)


def _with_joined_qkv(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    joined = {}
    for name in found:
        match = re.fullmatch(r"(blocks\.\d+\.attn)\.query\.(weight|bias)", name)
        if match is None:
            continue
        parts = [f"{match[1]}.{part}.{match[2]}" for part in ("query", "key", "value")]
        if all(part in found and found[part].shape == found[name].shape for part in parts):
            joined[f"{match[1]}.qkv.{match[2]}"] = parts
    used = {part for parts in joined.values() for part in parts}
    rest = {name: tensor for name, tensor in found.items() if name not in used}
    return rest | {name: torch.cat([found[p] for p in parts]) for name, parts in joined.items()}


READERS: dict[str, Callable[[Path], dict[str, torch.Tensor]]] = {
    ".npz": _read_npz,
    ".safetensors": _read_safetensors,
}
