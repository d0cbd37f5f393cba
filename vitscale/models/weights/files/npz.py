"""Read an untrusted .npz file.

Nothing is unpickled: object arrays are refused by their header. A file declares the sizes of its
arrays, so they are checked before memory is allocated.
"""

from __future__ import annotations

import math
import os
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from vitscale.config.errors import UserError
from vitscale.models.weights.files.limits import MAX_BYTES

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


def read_npz(
    path: Path, *, prefix_of: Callable[[Mapping[str, object]], str]
) -> dict[str, torch.Tensor]:
    """Arrays in fp32 whose names start with a prefix, which is removed.

    prefix_of: chooses it from all names; what is beside it, such as optimiser states, is not read.
    Raises UserError for files that cannot be trusted or are damaged, and OSError.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = _trusted_members(archive, path)
            prefix = prefix_of(members)
            return {
                name.removeprefix(prefix): _tensor(archive, info, path)
                for name, info in members.items()
                if name.startswith(prefix)
            }
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise UserError(f"is not a whole .npz file ({error})", where=str(path)) from None


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
