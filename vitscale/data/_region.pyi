"""Signatures of `_region.c`."""

import numpy as np

def size(data: bytes, max_pixels: int, /) -> tuple[int, int]: ...
def decode(
    data: bytes, box: tuple[int, int, int, int], out: np.ndarray, max_pixels: int, /
) -> None: ...
