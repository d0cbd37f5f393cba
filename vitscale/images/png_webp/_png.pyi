"""Signatures of `_png.c`. Both functions raise ValueError for damaged and unsupported images.

coded: inflated bytes of all rows. image: width, height, colour type of the header.
palette: 3 bytes per colour; empty for other colour types.
"""

import numpy as np

def whole(
    coded: bytes, image: tuple[int, int, int], palette: bytes | memoryview, out: np.ndarray, /
) -> None: ...
def crop(
    coded: bytes,
    image: tuple[int, int, int],
    palette: bytes | memoryview,
    box: tuple[int, int, int, int],
    out: np.ndarray,
    size: tuple[int, int],
    cubic: bool,
    antialias: bool,
    flip: bool,
    allow_avx2: bool,
    /,
) -> None: ...
