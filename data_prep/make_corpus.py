"""Write a small corpus as a folder of images, {train,test}/CLASS/NAME.png.

    python data_prep/make_corpus.py digits runs/digits/images
    python data_prep/make_corpus.py characters runs/characters/images

digits: scikit-learn's 1,797 handwritten digits of 8 x 8 grey values 0-16, the test part of UCI
"Optical Recognition of Handwritten Digits", as 32 x 32 PNG: enlarged here once, so that crops at 16
and 24 px are resampled as for any corpus.

characters: accented letters rendered from the fonts in matplotlib's wheel, the test images from
fonts that no training image has. Images of one letter differ in font, size, position, rotation,
shear and stroke, all drawn from counters. The bytes depend on the versions of matplotlib and of
Pillow, whose wheel holds FreeType and zlib; equal versions give equal bytes.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import shutil
import sys
import unicodedata
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from shlex import quote

try:
    import matplotlib
    import numpy as np
    from PIL import Image, ImageDraw, ImageFont

    from data_prep.steps.list_inputs import seeded_hash
    from vitscale.config.errors import UserError, not_written, run_script
    from vitscale.distributed.atomic_files import commit_folder
    from vitscale.distributed.random_numbers import CounterRandom, stream_key
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None

NUM_TEST = 360
SIDE_PX = 32
MAX_GREY = 16

# Four families of four styles, of which training has three each.
TRAIN_FONTS = """
    DejaVuSans DejaVuSans-Bold DejaVuSans-Oblique
    DejaVuSansMono DejaVuSansMono-Bold DejaVuSansMono-BoldOblique
    DejaVuSerif DejaVuSerif-BoldItalic DejaVuSerif-Italic
    STIXGeneralBol STIXGeneralBolIta STIXGeneralItalic
""".split()
# Every family and every style once.
TEST_FONTS = (
    "DejaVuSans-BoldOblique DejaVuSansMono-Oblique DejaVuSerif-Bold STIXGeneral".split()
)
# The letters with a mark of ISO 8859-1.
LETTERS = [
    chr(i) for i in range(0xC0, 0x100) if len(unicodedata.normalize("NFD", chr(i))) > 1
]

LETTER_PX = 48
# Letters are drawn large, then transformed at twice the size of the image, then halved.
LARGE_PX = 2 * LETTER_PX
MAX_EM = 0.66  # em per side of the image, leaves room for accents on capitals
MIN_EM = 0.54
MAX_WIDTH = 0.8  # of the image
BASELINE = 0.72  # below the upper border
JITTER = 0.04
ROTATION_DEGREES = 8.0
SHEAR = 0.12
MAX_STROKE = 0.02  # added to either side of a line, per side of the image


def main() -> None:
    arguments = parse_arguments()
    output = arguments.output
    if arguments.corpus == "digits":
        contents = dict(digit_files())
    else:
        contents = dict(
            character_files(num_train=arguments.num_train, num_test=arguments.num_test)
        )

    # Names are SPLIT/CLASS/NAME.png.
    num_train = sum(name.startswith("train/") for name in contents)
    num_classes = len({name.split("/")[1] for name in contents})
    # The folder is complete or absent, so an existing one need only be compared.
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
        f"next: vitscale prepare shards data/{arguments.corpus} "
        f"source.path={quote(str(output))} output={quote(str(output.with_name('shards')))}"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="vitscale prepare corpus", description=__doc__.split("\n", 1)[0]
    )
    corpora = parser.add_subparsers(dest="corpus", required=True, metavar="CORPUS")
    digits = corpora.add_parser("digits", help="scikit-learn's handwritten digits")
    letters = corpora.add_parser(
        "characters", help="letters of the fonts in matplotlib's wheel"
    )
    for corpus in (digits, letters):
        corpus.formatter_class = argparse.ArgumentDefaultsHelpFormatter
        corpus.add_argument("output", type=Path, help="folder to create")
    letters.add_argument(
        "--num-train", type=int, default=160, help="training images per letter"
    )
    letters.add_argument(
        "--num-test", type=int, default=40, help="test images per letter"
    )
    return parser.parse_args()


def digit_files() -> Iterator[tuple[str, bytes]]:
    """Yield {train,test}/DIGIT/NNNN.png and its content."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        raise UserError(
            "scikit-learn, which holds the digits, is missing",
            next_step="pip install scikit-learn",
        ) from None
    digits = load_digits()
    test = _choose_test(digits.target)
    for i, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        grey = np.rint(image * (255 / MAX_GREY)).astype(np.uint8)
        enlarged = Image.fromarray(grey).resize(
            (SIDE_PX, SIDE_PX), Image.Resampling.BICUBIC
        )
        file = io.BytesIO()
        enlarged.convert("RGB").save(file, format="PNG")
        yield f"{'test' if i in test else 'train'}/{label}/{i:04d}.png", file.getvalue()


def _choose_test(labels: np.ndarray) -> set[int]:
    """Positions held out for testing: in proportion to the classes, largest remainders first."""
    # Whole images per class, rounded down, then one more for the largest remainders.
    exact = np.bincount(labels) * NUM_TEST / len(labels)
    take = exact.astype(int)
    take[np.argsort(take - exact, kind="stable")[: NUM_TEST - take.sum()]] += 1
    chosen: set[int] = set()
    for label, num in enumerate(take):
        rows = np.flatnonzero(labels == label).tolist()
        # Hashes choose at random, and the same images with every version of NumPy.
        rows.sort(key=lambda i: seeded_hash(str(i), seed=0, purpose="digits test"))
        chosen.update(rows[:num])
    return chosen


def character_files(*, num_train: int, num_test: int) -> Iterator[tuple[str, bytes]]:
    """Yield {train,test}/LETTER/FONT-NNN.png and contents. The fonts of a letter take turns."""
    for letter in LETTERS:
        name = unicodedata.name(letter).lower().replace(" ", "_")
        for split, fonts, num in (
            ("train", TRAIN_FONTS, num_train),
            ("test", TEST_FONTS, num_test),
        ):
            for i in range(num):
                font = fonts[i % len(fonts)]
                # Each image has a key, so that it does not depend on how many there are.
                random = CounterRandom(stream_key("characters", 0, letter, font, i))
                yield f"{split}/{name}/{font}-{i:03d}.png", render(letter, font, random)


def render(letter: str, font: str, random: CounterRandom) -> bytes:
    """Return an RGB PNG of LETTER_PX pixels a side, white on black."""
    em = random.uniform(MIN_EM, MAX_EM)
    angle = math.radians(random.uniform(-ROTATION_DEGREES, ROTATION_DEGREES))
    shear = random.uniform(-SHEAR, SHEAR)
    shift_x, shift_y = random.uniform(-JITTER, JITTER), random.uniform(-JITTER, JITTER)
    # Half of the letters keep their own stroke.
    stroke = random.uniform(-MAX_STROKE, MAX_STROKE)

    em_px = round(MAX_EM * LARGE_PX)
    canvas = Image.new("L", (4 * em_px, 3 * em_px))
    ImageDraw.Draw(canvas).text(
        (em_px, 2 * em_px),
        letter,
        fill=255,
        font=_open_font(font, em_px),
        anchor="ls",
        stroke_width=round(max(0.0, stroke) * LARGE_PX),
    )
    # Wide letters are made narrower, so that they stay inside the image.
    left, _, right, _ = canvas.getbbox() or (0, 0, 1, 1)
    scale = min(em / MAX_EM, MAX_WIDTH * LARGE_PX / (right - left))
    # The middle of the letter's baseline on the canvas and in the image.
    source_x, source_y = (left + right) / 2, 2.0 * em_px
    target_x, target_y = (0.5 + shift_x) * LARGE_PX, (BASELINE + shift_y) * LARGE_PX
    # From a point of the image to one of the canvas: the inverse of rotation @ [[1, shear], [0, 1]]
    # * scale. Rounded, since the last digit of a sine differs between C libraries.
    cos = math.cos(angle) / scale
    sin = math.sin(angle) / scale
    a = round(cos + shear * sin, 6)
    b = round(sin - shear * cos, 6)
    d = round(-sin, 6)
    e = round(cos, 6)
    c = round(source_x - a * target_x - b * target_y, 6)
    f = round(source_y - d * target_x - e * target_y, 6)
    large = canvas.transform(
        (LARGE_PX, LARGE_PX),
        Image.Transform.AFFINE,
        (a, b, c, d, e, f),
        resample=Image.Resampling.BICUBIC,
    )
    file = io.BytesIO()
    large.reduce(2).convert("RGB").save(file, format="PNG")
    return file.getvalue()


@cache
def _open_font(font: str, em_px: int) -> ImageFont.FreeTypeFont:
    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{font}.ttf"
    # The basic layout needs no further library and is the same everywhere.
    return ImageFont.truetype(path, em_px, layout_engine=ImageFont.Layout.BASIC)


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
        raise not_written(error, str(output)) from None


def check_same_files(output: Path, contents: dict[str, bytes]) -> None:
    files = [path for path in output.rglob("*") if path.is_file()]
    found = {str(path.relative_to(output)): path.read_bytes() for path in files}
    if found != contents:
        raise UserError(
            "exists already and holds other files",
            where=output,
            next_step="choose another folder, or remove this one",
        )


if __name__ == "__main__":
    run_script(main)
