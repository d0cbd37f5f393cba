"""Signatures of `_region.c`. Both functions raise ValueError on whatever they do not take."""

import numpy as np

def size(data: bytes, max_pixels: int, /) -> tuple[int, int]: ...
def crop(
    data: bytes,
    box: tuple[int, int, int, int],
    out: np.ndarray,
    size: int,
    cubic: bool,
    antialias: bool,
    flip: bool,
    max_pixels: int,
    allow_avx2: bool,
    /,
) -> bool:
    """Whether our own decoder of ordinary JPEGs took the image, or libjpeg."""
