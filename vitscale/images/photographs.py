"""Turn images that were not prepared into upright, opaque RGB with 8 bits per sample.

The rules are those of data preparation (docs/images.md), so that a model sees an image as it would
see it in shards. Prepared images need none of this.
"""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image

from vitscale.images.crops import PILLOW_ERRORS, open_image
from vitscale.images.orientation import TAG, TURNS, UPRIGHT, upright

JPEG_START = b"\xff\xd8\xff"


def converted_pixels(data: bytes) -> torch.Tensor | None:
    """uint8 [H, W, 3]; None for an image that decoders turn into the same pixels, faster.

    Raises OSError if the image is unreadable, ValueError if it is too large.
    """
    with open_image(data) as image:
        orientation = _orientation(image)
        if data.startswith(JPEG_START) and orientation == UPRIGHT:
            return None
        image.load()
        plain = upright(_opaque(image), orientation)
        return torch.from_numpy(np.array(plain.convert("RGB")))


def _orientation(image: Image.Image) -> int:
    try:
        found = image.getexif().get(TAG, UPRIGHT)
    except (OSError, ValueError, *PILLOW_ERRORS):
        return UPRIGHT  # broken metadata does not make an image unreadable
    return found if found in TURNS else UPRIGHT


def _opaque(image: Image.Image) -> Image.Image:
    """8 bits per sample, transparent pixels over white."""
    if image.mode.startswith("I"):  # 16-bit grey, which Pillow would clip to white
        levels = np.asarray(image).astype(np.float64) / 257
        return Image.fromarray(levels.round().clip(0, 255).astype(np.uint8))
    if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
        over = image.convert("RGBA")
        plain = Image.new("RGB", image.size, (255, 255, 255))
        plain.paste(over, mask=over.getchannel("A"))
        return plain
    return image
