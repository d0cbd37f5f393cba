"""Turn decoded images into upright, opaque grey or RGB with 8 bits per sample.

The rules of data preparation (docs/images.md), which unprepared images follow too.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np
from PIL import Image

# EXIF 2.32, tag 274.
TAG, UPRIGHT = 274, 1
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
GREY = ("1", "L", "LA", "La")
# Errors of Pillow on broken bytes, besides OSError and ValueError.
PILLOW_ERRORS = (
    *(AssertionError, EOFError, LookupError, OverflowError, SyntaxError, TypeError),
    *(struct.error, zlib.error),
)


def orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8."""
    try:
        found = image.getexif().get(TAG, UPRIGHT)
    except (OSError, ValueError, *PILLOW_ERRORS):
        return UPRIGHT  # broken metadata does not make an image unreadable
    return found if isinstance(found, int) and found in TURNS else UPRIGHT


def upright(image: Image.Image, orientation: int) -> Image.Image:
    """Turn an image by its EXIF orientation; 1 returns the image itself."""
    return image.transpose(TURNS[orientation]) if orientation in TURNS else image


def has_opacity(image: Image.Image) -> bool:
    """Whether pixels may be transparent: by an alpha channel, a palette entry or a colour."""
    return image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info


def plain(image: Image.Image) -> Image.Image:
    """Return 8-bit L or RGB: 16-bit grey v as round(v / 257), transparent pixels over white."""
    if image.mode.startswith("I"):  # 16-bit grey, which Pillow would clip to white
        values = np.asarray(image)
        values = np.where(values == image.info.get("transparency", -1), 65535, values)
        levels = (values.astype(np.float64) / 257).round().clip(0, 255)
        return Image.fromarray(levels.astype(np.uint8))
    mode = "L" if image.mode in GREY else "RGB"
    if not has_opacity(image):
        return image if image.mode == mode else image.convert(mode)
    over = image.convert("LA" if mode == "L" else "RGBA")
    white = Image.new(mode, image.size, "white")
    white.paste(over.convert(mode), mask=over.getchannel("A"))
    return white


def rgb_pixels(image: Image.Image) -> np.ndarray:
    """Return the pixels of an image that was not prepared as decoders do, uint8 [H, W, 3]."""
    return np.array(upright(plain(image), orientation(image)).convert("RGB"))
