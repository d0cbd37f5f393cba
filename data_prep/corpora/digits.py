"""Make corpora of arrays that other packages hold: scikit-learn's digits, and (Fashion-)MNIST.

The digits are 1,797 images of 8 x 8 grey values 0-16 (UCI "Optical Recognition of Handwritten
Digits", test part), as 32 x 32 PNG: enlarged here once, so that crops at 16 and 24 px are resampled
as for any corpus. Files in the idx format are those of yann.lecun.com/exdb/mnist.
"""

from __future__ import annotations

import gzip
import io
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from data_prep.steps.list_inputs import seeded_hash
from vitscale.config.errors import UserError

NUM_TEST = 360
SIDE_PX = 32
MAX_GREY = 16
# Split -> the name that its files begin with.
NAMES = {"train": "train", "test": "t10k"}
# Two zero bytes, 8 for unsigned bytes, the number of dimensions; then each size, big-endian.
UBYTE = b"\0\0\x08"


def digit_files() -> Iterator[tuple[str, bytes]]:
    """Yield {train,test}/DIGIT/NNNN.png and its content."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        raise UserError(
            "scikit-learn, which holds the digits, is not installed",
            next_step='pip install -e ".[demo]"',
        ) from None
    digits = load_digits()
    test = _choose_test(digits.target)
    for i, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        grey = np.rint(image * (255 / MAX_GREY)).astype(np.uint8)
        enlarged = Image.fromarray(grey).resize((SIDE_PX, SIDE_PX), Image.Resampling.BICUBIC)
        file = io.BytesIO()
        enlarged.convert("RGB").save(file, format="PNG")
        yield f"{'test' if i in test else 'train'}/{label}/{i:04d}.png", file.getvalue()


def _choose_test(labels: np.ndarray) -> set[int]:
    """Positions held out for testing: in proportion to the classes, largest remainders first."""
    exact = np.bincount(labels) * NUM_TEST / len(labels)
    take = exact.astype(int)
    take[np.argsort(take - exact, kind="stable")[: NUM_TEST - take.sum()]] += 1
    chosen: set[int] = set()
    for label, num in enumerate(take):
        rows = np.flatnonzero(labels == label).tolist()
        rows.sort(key=lambda i: seeded_hash(str(i), seed=0, purpose="digits test"))
        chosen.update(rows[:num])
    return chosen


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
