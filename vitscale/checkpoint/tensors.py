"""Write and read tensors as safetensors files, which `folders` verifies before they are read.

Format: https://huggingface.co/docs/safetensors (8 bytes of header length, JSON header, data). It is
written here because the library wants all bytes at once, which would double the host memory.
"""

from __future__ import annotations

import json
import math
import os
import re
import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vitscale.distributed.atomic_files import retried

DTYPES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


class HostCopy:
    """One copy of a rank's tensors in host memory, laid out as the data of a tensor file.

    Kept from save to save: fresh memory costs more than the copy (page faults), and copies from a
    GPU need pinned memory to be fast, which is slow to get.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._places: dict[str, torch.Tensor] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ready: torch.cuda.Event | None = None

    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Get the memory for these tensors, as they are after the kernels queued so far."""
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self._places.clear()  # they would keep a replaced buffer alive
        if self._buffer.numel() != num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8)
            if self._stream is not None and num_bytes:
                pin_in_place(self._buffer)
        if self._stream is not None:
            self._ready = torch.cuda.current_stream(self._device).record_event()

    def take(self, tensors: Mapping[str, torch.Tensor]) -> list[bytes | memoryview]:
        """Copy the prepared tensors. Returns the file's bytes in pieces, valid until next time.

        On a GPU the copy runs concurrently with the kernels of the training thread.
        """
        # Widest first, as the library does, so that every tensor is aligned.
        order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
        with torch.no_grad(), torch.cuda.stream(self._stream):
            if self._stream is not None and self._ready is not None:
                self._stream.wait_event(self._ready)
            header: dict[str, object] = {}
            end = 0
            for name in order:
                tensor = tensors[name]
                start, end = end, end + tensor.nbytes
                place = self._buffer[start:end].view(tensor.dtype).view(tensor.shape)
                place.copy_(tensor, non_blocking=True)
                self._places[name] = place
                header[name] = {
                    "dtype": DTYPES[tensor.dtype],
                    "shape": list(tensor.shape),
                    "data_offsets": [start, end],
                }
            if self._stream is not None:
                self._stream.synchronize()
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return [len(text).to_bytes(8, "little") + text, self._buffer.numpy().data]

    def not_finite(self) -> list[str]:
        """Names of the tensors copied last that hold a NaN or an infinity."""
        return [
            name
            for name, place in self._places.items()
            if place.is_floating_point() and place.numel()
            # Ten times as fast as isfinite; NaN is the least and the greatest of everything.
            if not all(map(math.isfinite, torch.aminmax(place)))
        ]


def pin_in_place(buffer: torch.Tensor) -> None:
    """Pin a buffer while it lives; torch's own pinned memory is rounded up to a power of two."""
    cuda: Any = torch.cuda.cudart()
    torch.cuda.check_error(cuda.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
    weakref.finalize(buffer, cuda.cudaHostUnregister, buffer.data_ptr()).atexit = False


SLICE = re.compile(r"(?P<name>.+)@(?P<start>\d+)/(?P<shape>[\dx]*)")
LENGTH_BYTES = 8


def slice_name(name: str, *, start: int, shape: Iterable[int]) -> str:
    """Name of a one-dimensional piece: elements from `start` of a tensor of `shape`, flattened."""
    return f"{name}@{start}/{'x'.join(map(str, shape))}"


class Slice(NamedTuple):
    """Consecutive elements of a flattened tensor in a file."""

    start: int
    num_elements: int
    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: str
    """As the file names it: F32, BF16, ..."""
    path: str
    offset: int
    """First byte in the file."""


def read_header(path: Path) -> list[Slice]:
    """What a verified file holds. Raises OSError."""

    def read() -> tuple[int, dict[str, Any]]:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            return length, json.loads(file.read(length))

    length, header = retried(read)
    header.pop("__metadata__", None)
    slices = []
    for name, entry in header.items():
        shape, start = tuple(entry["shape"]), 0
        num_elements = math.prod(shape)
        if piece := SLICE.fullmatch(name):
            name, start = piece["name"], int(piece["start"])
            shape = tuple(int(size) for size in piece["shape"].split("x") if size)
        offset = LENGTH_BYTES + length + entry["data_offsets"][0]
        slices.append(Slice(start, num_elements, name, shape, entry["dtype"], str(path), offset))
    return slices


def read_tensors(files: Iterable[Path], *, prefix: str = "") -> dict[str, torch.Tensor]:
    """Whole tensors on the CPU whose names start with `prefix`, which is removed."""
    slices = [each for path in files for each in read_header(path) if each.name.startswith(prefix)]
    with SavedTensors(slices) as saved:
        names = dict.fromkeys(each.name for each in slices)
        return {name.removeprefix(prefix): saved.whole(name) for name in names}


class SavedTensors:
    """Reads ranges of a checkpoint's tensors; memory for one range at a time.

    As a context manager it closes its files.
    """

    def __init__(self, slices: Iterable[Slice]) -> None:
        """slices: of all files, in any order."""
        self._slices: dict[str, list[Slice]] = {}
        for each in slices:
            self._slices.setdefault(each.name, []).append(each)
        self._open: dict[str, int] = {}

    def part(self, name: str, start: int, num_elements: int) -> torch.Tensor:
        """Elements from `start` of a flattened tensor, on the CPU. Raises OSError."""
        slices, stop = self._slices[name], start + num_elements
        dtype = TORCH_DTYPES[slices[0].dtype]
        found = torch.empty(num_elements * dtype.itemsize, dtype=torch.uint8)
        num_read = 0
        for each in slices:
            first, last = max(start, each.start), min(stop, each.start + each.num_elements)
            if first < last:
                here = slice((first - start) * dtype.itemsize, (last - start) * dtype.itemsize)
                offset = each.offset + (first - each.start) * dtype.itemsize
                retried(partial(self._read, each.path, offset, into=found[here]))
                num_read += last - first
        assert num_read == num_elements, f"slices of {name} overlap or do not cover it"
        return found.view(dtype)

    def whole(self, name: str) -> torch.Tensor:
        """A whole tensor. Raises OSError."""
        shape = self._slices[name][0].shape
        return self.part(name, 0, math.prod(shape)).view(shape)

    def _read(self, path: str, offset: int, *, into: torch.Tensor) -> None:
        if path not in self._open:
            self._open[path] = os.open(path, os.O_RDONLY)
        left = into.numpy().data
        while left:
            count = os.preadv(self._open[path], [left], offset)
            if count == 0:
                raise OSError(f"{path} has become shorter")
            left, offset = left[count:], offset + count

    def __enter__(self) -> SavedTensors:
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            os.close(self._open.popitem()[1])
