"""Write scikit-learn's handwritten digits as a folder of images: a corpus without a download.

    python data_prep/make_digits.py runs/demo/images

1,797 images of 8 x 8 grey values 0-16 (UCI "Optical Recognition of Handwritten Digits", test part),
as 32 x 32 PNG: enlarged here once, so that crops at 16 and 24 px are resampled as for any corpus.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import sys
from pathlib import Path

try:
    import numpy as np
    from PIL import Image

    from data_prep.pipeline.row_tables import seeded_hash
    from vitscale.config.errors import UserError, run_script
    from vitscale.distributed.atomic_files import commit_folder
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None

NUM_TEST = 360
SIDE_PX = 32
MAX_GREY = 16


def main() -> None:
    parser = argparse.ArgumentParser(description="Write handwritten digits as PNG files.")
    parser.add_argument("output", type=Path, help="folder to create: {train,test}/DIGIT/NNNN.png")
    parser.add_argument("--seed", type=int, default=0, help="selects the test images (default 0)")
    arguments = parser.parse_args()
    output: Path = arguments.output
    images, labels = load_digits_arrays()
    test = choose_test(labels.tolist(), num_test=NUM_TEST, seed=arguments.seed)
    contents = {
        f"{'test' if i in test else 'train'}/{label}/{i:04d}.png": to_png(image)
        for i, (image, label) in enumerate(zip(images, labels, strict=True))
    }
    if output.exists():
        check_same_files(output, contents)
        print(f"{output}: already there, the same {len(contents)} images")
        return
    temporary = output.with_name(f".{output.name}.preparing")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        for name, png in contents.items():
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            (temporary / name).write_bytes(png)
        os.sync()  # one flush instead of 1,797
        commit_folder(temporary, output)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(f"cannot be written ({error.strerror})", where=str(output)) from None
    print(f"{output}: {len(contents) - len(test)} training and {len(test)} test images, 10 classes")
    print(
        "next: python data_prep/make_shards.py --config configs/data/digits.yaml "
        f"source.path={output}"
    )


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


def check_same_files(output: Path, contents: dict[str, bytes]) -> None:
    found = {str(path.relative_to(output)) for path in output.rglob("*") if not path.is_dir()}
    if found != set(contents) or any((output / n).read_bytes() != c for n, c in contents.items()):
        raise UserError(
            "exists already and holds other files",
            where=str(output),
            next_step="choose another folder, or remove this one",
        )


if __name__ == "__main__":
    run_script(main)
