"""Make the digits corpus: scikit-learn's handwritten digits as PNG files.

1,797 images of 8 x 8 grey values 0-16 (UCI "Optical Recognition of Handwritten Digits", test part),
as 32 x 32 PNG: enlarged here once, so that crops at 16 and 24 px are resampled as for any corpus.
"""

from __future__ import annotations

import io
from collections.abc import Iterator

import numpy as np
from PIL import Image

from data_prep.steps.rows import seeded_hash
from vitscale.config.errors import UserError

NUM_TEST = 360
SIDE_PX = 32
MAX_GREY = 16


def digit_files(*, seed: int) -> Iterator[tuple[str, bytes]]:
    """Yield {train,test}/DIGIT/NNNN.png and its content. The seed selects the test images."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        raise UserError(
            "scikit-learn, which holds the digits, is not installed",
            next_step='pip install -e ".[demo]"',
        ) from None
    digits = load_digits()
    test = _choose_test(digits.target, seed=seed)
    for i, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        grey = np.rint(image * (255 / MAX_GREY)).astype(np.uint8)
        enlarged = Image.fromarray(grey).resize((SIDE_PX, SIDE_PX), Image.Resampling.BICUBIC)
        file = io.BytesIO()
        enlarged.convert("RGB").save(file, format="PNG")
        yield f"{'test' if i in test else 'train'}/{label}/{i:04d}.png", file.getvalue()


def _choose_test(labels: np.ndarray, *, seed: int) -> set[int]:
    """Positions held out for testing: in proportion to the classes, largest remainders first."""
    exact = np.bincount(labels) * NUM_TEST / len(labels)
    take = exact.astype(int)
    take[np.argsort(take - exact, kind="stable")[: NUM_TEST - take.sum()]] += 1
    chosen: set[int] = set()
    for label, num in enumerate(take):
        rows = np.flatnonzero(labels == label).tolist()
        rows.sort(key=lambda i: seeded_hash(str(i), seed=seed, purpose="digits test"))
        chosen.update(rows[:num])
    return chosen
