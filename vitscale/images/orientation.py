"""Turn images upright by their EXIF orientation. Needs no torch."""

from __future__ import annotations

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


def upright(image: Image.Image, orientation: object) -> Image.Image:
    """The image itself for 1 and for values that EXIF does not define."""
    if not isinstance(orientation, int) or orientation not in TURNS:
        return image
    return image.transpose(TURNS[orientation])
