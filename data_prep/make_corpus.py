"""Write a small corpus as a folder of images, {train,test}/CLASS/NAME.png.

    python data_prep/make_corpus.py digits runs/digits/images
    python data_prep/make_corpus.py characters runs/characters/images

digits: scikit-learn's 1,797 handwritten digits of 8 x 8 grey values 0-16, the test part of UCI
"Optical Recognition of Handwritten Digits", as 32 x 32 PNG: enlarged here once, so that crops at 16
and 24 px are resampled as for any corpus. characters: accented letters rendered from the
fonts in matplotlib's wheel, with other fonts for the test images.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

try:
    import numpy as np
    from PIL import Image

    from data_prep.corpora.characters import character_files
    from data_prep.steps.list_inputs import seeded_hash
    from vitscale.config.errors import UserError, run_script
    from vitscale.distributed.atomic_files import commit_folder
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None

NUM_TEST = 360
SIDE_PX = 32
MAX_GREY = 16


def main() -> None:
    arguments = parse_arguments()
    output = arguments.output
    if arguments.corpus == "digits":
        contents = dict(digit_files())
    else:
        numbers = {"num_train": arguments.num_train, "num_test": arguments.num_test}
        contents = dict(character_files(**numbers))
    num_train = sum(name.startswith("train/") for name in contents)
    num_classes = len({name.split("/")[1] for name in contents})
    if output.exists():
        check_same_files(output, contents)
        print(f"{output}: already there, the same {len(contents):,} images")
        return
    write_files(output, contents)
    print(
        f"{output}: {num_train:,} training and {len(contents) - num_train:,} test images, "
        f"{num_classes:,} classes"
    )
    print(
        f"next: python data_prep/make_shards.py --config configs/data/{arguments.corpus}.yaml "
        f"source.path={output} output={output.with_name('shards')}"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    corpora = parser.add_subparsers(dest="corpus", required=True, metavar="CORPUS")
    digits = corpora.add_parser("digits", help="scikit-learn's handwritten digits")
    letters = corpora.add_parser("characters", help="letters of the fonts in matplotlib's wheel")
    for corpus in (digits, letters):
        corpus.formatter_class = argparse.ArgumentDefaultsHelpFormatter
        corpus.add_argument("output", type=Path, help="folder to create")
    letters.add_argument("--num-train", type=int, default=160, help="training images per letter")
    letters.add_argument("--num-test", type=int, default=40, help="test images per letter")
    return parser.parse_args()


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


def write_files(output: Path, contents: dict[str, bytes]) -> None:
    """Write all files or none."""
    temporary = output.with_name(f".{output.name}.preparing")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        for name, png in contents.items():
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            (temporary / name).write_bytes(png)
        os.sync()  # one flush instead of one for each file
        commit_folder(temporary, output)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(f"cannot be written ({error.strerror})", where=str(output)) from None


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
