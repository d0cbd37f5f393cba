"""Read the sizes of PNG and WebP images, and decode whole WebP images with torchvision's libwebp.

Owns: which files are left to Pillow: everything unusual or damaged.
Leaves out: JPEG (`decoders`), crops (`crops`). PNG pixels: torchvision 0.29's `decode_png` ends the
process with a segmentation fault on a damaged file, so Pillow decodes them.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from types import ModuleType

import torch

from vitscale.images.crops import MAX_PIXELS

PNG_START = b"\x89PNG\r\n\x1a\n"


def size_of(data: bytes) -> tuple[int, int] | None:
    """Width and height from the header; None if that is left to Pillow."""
    try:
        if data.startswith(PNG_START):
            width, height = struct.unpack_from(">II", data, 16)
        elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            width, height = _webp_size(data)
        else:
            return None
    except (struct.error, IndexError):
        return None
    return (width, height) if 0 < width * height <= MAX_PIXELS else None


def decode_webp(data: bytes) -> torch.Tensor | None:
    """All pixels of a WebP, uint8 [H, W, 3]; None if the image is left to Pillow."""
    if not data.startswith(b"RIFF"):
        return None
    size, io = size_of(data), _torchvision_io()
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


def _webp_size(data: bytes) -> tuple[int, int]:
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
