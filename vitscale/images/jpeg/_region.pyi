"""Signatures of `_region.c`. All functions raise ValueError for unsupported or damaged images."""

import numpy as np

def size(data: bytes, max_pixels: int, /) -> tuple[int, int]: ...
def entries(data: bytes | memoryview, each: int, max_pixels: int, /) -> bytes:
    """Places where decoding can start, every `each` MCUs of a row; empty if there can be none."""

Crop = tuple[
    tuple[int, int, int, int],  # left, top, width, height
    np.ndarray,  # uint8 [3, rows, columns], filled
    int | tuple[int, int],  # a side, or rows and columns
    bool,  # bicubic
    bool,  # antialias
    bool,  # mirror left and right
]

def crop(
    data: bytes,
    crops: list[Crop],
    max_pixels: int,
    allow_avx2: bool,
    entries: bytes | memoryview,
    /,
) -> bool:
    """Fill all crops in one pass. Returns whether our own decoder of ordinary JPEGs was used,
    instead of libjpeg."""
