"""Read an untrusted file of `torch.save`: tensors by name, and nothing else.

Owns: what such a file may hold and claim. `torch.load(weights_only=True)` creates no other objects
than those of `ALLOWED`, but it does load compressed members, and allocates what a file claims. So
the pickle is scanned first, sizes are taken in a pass without memory, and the weights are mapped.
"""

from __future__ import annotations

import argparse
import pathlib
import pickle
import pickletools
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import safe_globals

from vitscale.config.errors import UserError
from vitscale.models.weights.files.limits import MAX_BYTES, check_size

# Where training scripts put the weights. MAE, DeiT: `model`; timm: `state_dict`; DINO: `teacher`.
WEIGHT_KEYS = ("model", "state_dict", "teacher")
# Of `args` in the files of MAE and DeiT.
EXTRA_TYPES: list[Any] = [argparse.Namespace, pathlib.PosixPath]
# Names that a pickle of tensors needs. Others, such as bytearray, can claim any size.
ALLOWED = re.compile(
    r"torch \w*Storage|torch\.storage (Typed|Untyped)Storage|torch (Size|device)"
    r"|torch (float|bfloat|int|uint|bool|complex|half|double|long|short|q\w*int)\w*"
    r"|torch\._utils _rebuild_(tensor|tensor_v2|parameter)|torch\.nn\.parameter Parameter"
    r"|collections OrderedDict|argparse Namespace|pathlib(\._local)? PosixPath"
)
MAX_PICKLE_BYTES = 64 * 2**20
# The first value of the format before torch 1.6: torch/serialization.py, MAGIC_NUMBER.
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
NUM_LEGACY_PICKLES = 5  # magic, protocol, machine, weights, keys of the storages


def read_torch_file(path: Path) -> dict[str, torch.Tensor]:
    """Tensors by name in fp32, also below one of `WEIGHT_KEYS`; no code of the file runs.

    Raises UserError for files that cannot be trusted, are damaged or hold no weights, and OSError.
    """
    size = check_size(path)
    is_zip = zipfile.is_zipfile(path)
    _check_pickles(path, _zip_pickle(path) if is_zip else None)
    try:
        # Sizes first, without memory: fake tensors have none.
        with FakeTensorMode():
            claimed = _loaded(path, mmap=False)
        _check_claims(_tensors(claimed, path), size=size, path=path)
        # Mapped, storages end where the file does.
        found = _tensors(_loaded(path, mmap=is_zip), path)
        return {name: value.detach().to(torch.float32, copy=True) for name, value in found.items()}
    except (pickle.UnpicklingError, EOFError, RuntimeError, ValueError, LookupError, TypeError,
            AttributeError, AssertionError, MemoryError) as error:  # fmt: skip
        if isinstance(error, UserError):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise _damaged(path, reason) from None


def _loaded(path: Path, *, mmap: bool) -> Any:
    with safe_globals(EXTRA_TYPES):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)


def _zip_pickle(path: Path) -> bytes:
    """The pickle of a zip file whose members are stored, not compressed."""
    try:
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
            packed = [i.filename for i in infos if i.compress_type != zipfile.ZIP_STORED]
            if packed:
                what = f"{packed[0]!r} is compressed, as torch.save never does"
                raise UserError(what, where=str(path), next_step="save the weights again")
            pickles = [info for info in infos if info.filename.endswith("data.pkl")]
            if len(pickles) != 1 or pickles[0].file_size > MAX_PICKLE_BYTES:
                raise _damaged(path, "not one data.pkl of a usual size")
            return archive.read(pickles[0])
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        raise _damaged(path, str(error)) from None


def _check_pickles(path: Path, pickled: bytes | None) -> None:
    """Refuse names of other objects than tensors before anything is unpickled."""
    try:
        if pickled is not None:
            names = _names(pickled)
        else:
            with path.open("rb") as file:
                if _first_value(file) != LEGACY_MAGIC:
                    raise _damaged(path, "not a file of torch.save")
                names = set().union(*(_names(file) for _ in range(NUM_LEGACY_PICKLES - 1)))
    except (ValueError, IndexError, EOFError, MemoryError, OverflowError) as error:
        if isinstance(error, UserError):
            raise
        raise _damaged(path, (str(error).splitlines() or [""])[0]) from None
    odd = sorted(name for name in names if ALLOWED.fullmatch(name) is None)
    if odd:
        shown = ", ".join(repr(name.replace(" ", ".")) for name in odd[:3])
        raise UserError(
            f"needs {shown} to be loaded, which may run code; nothing of it was loaded",
            where=str(path),
            allowed="tensors, numbers, texts, argparse.Namespace and pathlib.PosixPath",
            next_step="save the weights alone where the file comes from, best as .safetensors",
        )


def _names(pickled: bytes | IO[bytes]) -> set[str]:
    """ "module name" of all that a pickle looks up; one that is read from the stack is "?"."""
    looked_up = {"GLOBAL", "INST", "STACK_GLOBAL", "EXT1", "EXT2", "EXT4"}
    return {
        str(argument) if opcode.name in ("GLOBAL", "INST") else f"? {opcode.name}"
        for opcode, argument, _ in pickletools.genops(pickled)
        if opcode.name in looked_up
    }


def _first_value(file: IO[bytes]) -> Any:
    """The number that is the whole of the first pickle."""
    return next((arg for op, arg, _ in list(pickletools.genops(file)) if op.name == "LONG1"), None)


def _tensors(found: Any, path: Path) -> dict[str, torch.Tensor]:
    """Tensors by name, also below a key."""
    for key in WEIGHT_KEYS:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
            break
    if not (isinstance(found, Mapping) and found):
        raise UserError("holds no tensors by name", where=str(path))
    odd = [key for key, value in found.items() if not isinstance(value, torch.Tensor)]
    if odd:
        keys = ", ".join(WEIGHT_KEYS)
        allowed = f"tensors by name, also below one of {keys}"
        raise UserError(f"{odd[0]!r} is no tensor", where=str(path), allowed=allowed)
    return {str(key): value for key, value in found.items()}


def _check_claims(tensors: Mapping[str, torch.Tensor], *, size: int, path: Path) -> None:
    """Refuse tensors larger than what is stored of them: stride 0 makes terabytes of a number."""
    total = 0
    for name, tensor in tensors.items():
        total += 4 * tensor.numel()
        stored = tensor.untyped_storage().nbytes()
        if tensor.numel() * tensor.element_size() > stored or stored > size or total > MAX_BYTES:
            shape = "x".join(map(str, tensor.shape))
            raise UserError(
                f"{name!r} claims {shape} values, more than the file of {size:,} bytes holds",
                where=str(path),
                next_step="do not use this file: it is damaged or malicious",
            )


def _damaged(path: Path, reason: str) -> UserError:
    return UserError(
        f"is damaged or no file of weights ({reason})",
        where=str(path),
        next_step="download it again, or save the weights as .safetensors",
    )
