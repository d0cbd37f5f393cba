"""Read the sizes of WebP images, and decode whole ones with torchvision's libwebp.

Owns: which files are left to Pillow: everything unusual or damaged.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from types import ModuleType

import torch


def size_of(data: bytes, *, max_pixels: int) -> tuple[int, int] | None:
    """Width and height from the header; None if that is left to Pillow."""
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP":
        return None
    try:
        width, height = _picture_size(data)
    except (struct.error, IndexError):
        return None
    return (width, height) if 0 < width * height <= max_pixels else None


def whole(data: bytes, *, max_pixels: int) -> torch.Tensor | None:
    """All pixels of a WebP, uint8 [H, W, 3]; None if the image is left to Pillow."""
    size = size_of(data, max_pixels=max_pixels)
    io = None if size is None else _torchvision_io()
    if size is None or io is None:
        return None
    try:
        stored = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        pixels: torch.Tensor = io.decode_webp(stored, io.ImageReadMode.RGB).permute(1, 2, 0)
    except RuntimeError:
        return None
    width, height = size
    return pixels if pixels.shape == (height, width, 3) else None


@lru_cache
def _torchvision_io() -> ModuleType | None:
    try:
        import torchvision.io
    except (ImportError, OSError, RuntimeError):  # another version than torch's, no libraries
        return None
    found: ModuleType = torchvision.io
    return found if hasattr(found, "decode_webp") else None


def _picture_size(data: bytes) -> tuple[int, int]:
    """Raises struct.error where there is anything but one complete picture."""
    kind = data[12:16]
    whole, picture = struct.unpack_from("<I8xI", data, 4)
    if whole + 8 != len(data) or picture + (picture & 1) + 12 != whole:
        raise struct.error("more or less than one picture")
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    if kind == b"VP8L" and data[20] == 0x2F:
        (packed,) = struct.unpack_from("<I", data, 21)
        return (packed & 0x3FFF) + 1, (packed >> 14 & 0x3FFF) + 1
    raise struct.error(f"{kind!r}")
