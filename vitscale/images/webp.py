"""Read ordinary WebP images with torchvision, in half to three quarters of Pillow's time.

Owns: which files are left to Pillow: everything unusual or damaged.
PNG stays with Pillow: an error of libpng ends the process inside torchvision 0.29.
"""

from __future__ import annotations

import struct

import torch


def size_of(data: bytes, *, max_pixels: int) -> tuple[int, int] | None:
    """Width and height from the header; None if that is left to Pillow."""
    try:
        width, height = _picture_size(data)
    except (struct.error, IndexError):
        return None
    return (width, height) if 0 < width * height <= max_pixels else None


def decode(data: bytes, *, max_pixels: int) -> torch.Tensor | None:
    """All pixels, uint8 [H, W, 3]; None if the image is left to Pillow."""
    size = size_of(data, max_pixels=max_pixels)
    if size is None:
        return None
    # Imported late: it takes seconds, and only WebP needs it.
    from torchvision.io import ImageReadMode, decode_webp

    try:
        stored = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        pixels: torch.Tensor = decode_webp(stored, ImageReadMode.RGB).permute(1, 2, 0)
    except RuntimeError:
        return None
    return pixels if pixels.shape == (size[1], size[0], 3) else None


def _picture_size(data: bytes) -> tuple[int, int]:
    """Raises struct.error where there is anything but one complete picture."""
    form, whole, name, kind, picture = struct.unpack_from("<4sI4s4sI", data)
    if (form, name) != (b"RIFF", b"WEBP"):
        raise struct.error("not WebP")
    if whole + 8 != len(data) or picture + (picture & 1) + 12 != whole:
        raise struct.error("more or less than one picture")
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    if kind == b"VP8L" and data[20] == 0x2F:
        (packed,) = struct.unpack_from("<I", data, 21)
        return (packed & 0x3FFF) + 1, (packed >> 14 & 0x3FFF) + 1
    raise struct.error(f"{kind!r}")
