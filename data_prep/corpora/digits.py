"""Make the digits corpus: scikit-learn's handwritten digits as PNG files.

1,797 images of 8 x 8 grey values 0-16 (UCI "Optical Recognition of Handwritten Digits", test part),
as 32 x 32 PNG: enlarged here once, so that crops at 16 and 24 px are resampled as for any corpus.
"""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from data_prep.steps.rows import seeded_hash
from vitscale.config.errors import UserError

NUM_TEST = 360
SIDE_PX = 32
MAX_GREY = 16


def digit_files(*, seed: int) -> dict[str, bytes]:
    """{train,test}/DIGIT/NNNN.png -> contents. The seed selects the test images."""
    images, labels = load_digits_arrays()
    test = choose_test(labels.tolist(), num_test=NUM_TEST, seed=seed)
    return {
        f"{'test' if i in test else 'train'}/{label}/{i:04d}.png": to_png(image)
        for i, (image, label) in enumerate(zip(images, labels, strict=True))
    }


def load_digits_arrays() -> tuple[np.ndarray, np.ndarray]:
    """(images [1797, 8, 8] of 0-16, labels [1797])."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        raise UserError(
            "scikit-learn, which holds the digits, is not installed",
            next_step='pip install -e ".[demo]"',
        ) from None
    digits = load_digits()
    return digits.images, digits.target


def choose_test(labels: list[int], *, num_test: int, seed: int) -> set[int]:
    """Positions held out for testing: in proportion to the classes, largest remainders first."""
    of_class: dict[int, list[int]] = {}
    for i, label in enumerate(labels):
        of_class.setdefault(label, []).append(i)
    exact = {label: len(rows) * num_test / len(labels) for label, rows in of_class.items()}
    take = {label: int(share) for label, share in exact.items()}
    by_remainder = sorted(exact, key=lambda label: (take[label] - exact[label], label))
    for label in by_remainder[: num_test - sum(take.values())]:
        take[label] += 1
    chosen: set[int] = set()
    for label, rows in of_class.items():
        ranked = sorted(rows, key=lambda i: seeded_hash(str(i), seed=seed, purpose="digits test"))
        chosen.update(ranked[: take[label]])
    return chosen


def to_png(image: np.ndarray) -> bytes:
    """One digit as an RGB PNG of SIDE_PX pixels a side."""
    grey = np.rint(image * (255 / MAX_GREY)).astype(np.uint8)
    enlarged = Image.fromarray(grey).resize((SIDE_PX, SIDE_PX), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    enlarged.convert("RGB").save(file, format="PNG")
    return file.getvalue()
