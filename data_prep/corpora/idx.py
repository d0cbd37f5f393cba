"""Read image files in the idx format of MNIST and Fashion-MNIST (yann.lecun.com/exdb/mnist)."""

from __future__ import annotations

import gzip
import io
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from vitscale.config.errors import UserError

# Split -> the name that its files begin with.
NAMES = {"train": "train", "test": "t10k"}
# Two zero bytes, 8 for unsigned bytes, the number of dimensions; then each size, big-endian.
UBYTE = b"\0\0\x08"


def idx_files(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield {train,test}/LABEL/NNNNN.png and its content, grey. Raises UserError."""
    for split, name in NAMES.items():
        images = read_idx(folder / f"{name}-images-idx3-ubyte", num_dimensions=3)
        labels = read_idx(folder / f"{name}-labels-idx1-ubyte", num_dimensions=1)
        if len(images) != len(labels):
            raise UserError(f"{len(images)} images, but {len(labels)} labels", where=str(folder))
        for i, (image, label) in enumerate(zip(images, labels, strict=True)):
            file = io.BytesIO()
            Image.fromarray(image).save(file, format="PNG")
            yield f"{split}/{label}/{i:05d}.png", file.getvalue()


def read_idx(path: Path, *, num_dimensions: int) -> np.ndarray:
    """uint8 array of a file, or of the same packed as `.gz`. Raises UserError."""
    packed = path.with_name(f"{path.name}.gz")
    try:
        data = gzip.decompress(packed.read_bytes()) if packed.exists() else path.read_bytes()
    except (OSError, EOFError) as error:
        raise UserError(f"cannot be read ({error})", where=str(path), allowed="also .gz") from None
    start = 4 + 4 * num_dimensions
    sizes = np.frombuffer(data[4:start], ">u4").tolist() if len(data) >= start else []
    if data[:4] != UBYTE + bytes([num_dimensions]) or len(data) != start + math.prod(sizes):
        raise UserError("is not a whole idx file of bytes", where=str(path))
    return np.frombuffer(data, np.uint8, offset=start).reshape(sizes)
