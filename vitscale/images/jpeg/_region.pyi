"""Signatures of `_region.c`. All functions raise ValueError for unsupported or damaged images."""

import numpy as np

def size(data: bytes, max_pixels: int, /) -> tuple[int, int]: ...
def entries(data: bytes | memoryview, each: int, max_pixels: int, /) -> bytes:
    """Places where decoding can start, every `each` MCUs of a row; empty if there can be none."""

def crop(
    data: bytes,
    box: tuple[int, int, int, int],
    out: np.ndarray,
    size: int | tuple[int, int],
    cubic: bool,
    antialias: bool,
    flip: bool,
    max_pixels: int,
    allow_avx2: bool,
    entries: bytes | memoryview,
    /,
) -> bool:
    """Returns whether our own decoder of ordinary JPEGs was used, instead of libjpeg."""
