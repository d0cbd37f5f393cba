"""Decode images that were not prepared as they would be decoded from shards (`plain`)."""

from __future__ import annotations

import numpy as np
import torch

from vitscale.images.crops import open_image
from vitscale.images.plain import UPRIGHT, orientation, plain, upright

JPEG_START = b"\xff\xd8\xff"


def converted_pixels(data: bytes) -> torch.Tensor | None:
    """uint8 [H, W, 3]; None for an image that decoders turn into the same pixels, faster.

    Raises OSError if the image is unreadable, ValueError if it is too large.
    """
    with open_image(data) as image:
        turn = orientation(image)
        if data.startswith(JPEG_START) and turn == UPRIGHT:
            return None
        image.load()
        return torch.from_numpy(np.array(upright(plain(image), turn).convert("RGB")))
