"""Make the characters corpus: accented letters rendered from the fonts in matplotlib's wheel.

Images of one letter differ in font, size, position, rotation, shear and stroke, all drawn from
counters. The test images are rendered from fonts that no training image has.

The bytes depend on the fonts (matplotlib's version) and on Pillow's version, whose wheel holds
FreeType and zlib; equal versions give equal bytes.
"""

from __future__ import annotations

import io
import math
import unicodedata
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from vitscale.config.errors import UserError
from vitscale.distributed.random_numbers import CounterRandom, stream_key

FAMILIES = {
    "DejaVuSans": ("", "-Bold", "-BoldOblique", "-Oblique"),
    "DejaVuSansMono": ("", "-Bold", "-BoldOblique", "-Oblique"),
    "DejaVuSerif": ("", "-Bold", "-BoldItalic", "-Italic"),
    "STIXGeneral": ("", "Bol", "BolIta", "Italic"),
}
FONTS = [f"{family}{style}" for family, styles in FAMILIES.items() for style in styles]
# Every family and every style once.
TEST_FONTS = ["DejaVuSans-BoldOblique", "DejaVuSansMono-Oblique", "DejaVuSerif-Bold", "STIXGeneral"]
# The letters with a mark of ISO 8859-1.
LETTERS = [chr(i) for i in range(0xC0, 0x100) if len(unicodedata.normalize("NFD", chr(i))) > 1]

SIDE_PX = 48
# Letters are drawn large, then transformed at twice the size of the image, then halved.
LARGE_PX = 2 * SIDE_PX
MAX_EM = 0.66  # em per side of the image, leaves room for accents on capitals
MIN_EM = 0.54
MAX_WIDTH = 0.8  # of the image
BASELINE = 0.72  # below the upper border
JITTER = 0.04
ROTATION_DEGREES = 8.0
SHEAR = 0.12
MAX_STROKE = 0.02  # added to either side of a line, per side of the image


def character_files(*, num_train: int, num_test: int) -> Iterator[tuple[str, bytes]]:
    """Yield {train,test}/LETTER/FONT-NNN.png and contents. The fonts of a letter take turns."""
    trained = [font for font in FONTS if font not in TEST_FONTS]
    for letter in LETTERS:
        name = unicodedata.name(letter).lower().replace(" ", "_")
        for split, fonts, num in (("train", trained, num_train), ("test", TEST_FONTS, num_test)):
            for i in range(num):
                font = fonts[i % len(fonts)]
                random = CounterRandom(stream_key("characters", 0, letter, font, i))
                yield f"{split}/{name}/{font}-{i:03d}.png", render(letter, font, random)


def render(letter: str, font: str, random: CounterRandom) -> bytes:
    """Return an RGB PNG of SIDE_PX pixels a side, white on black."""
    em = random.uniform(MIN_EM, MAX_EM)
    angle = math.radians(random.uniform(-ROTATION_DEGREES, ROTATION_DEGREES))
    shear = random.uniform(-SHEAR, SHEAR)
    shift_x, shift_y = random.uniform(-JITTER, JITTER), random.uniform(-JITTER, JITTER)
    stroke = random.uniform(-MAX_STROKE, MAX_STROKE)  # half of the letters keep their own

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
    left, _, right, _ = canvas.getbbox() or (0, 0, 1, 1)
    scale = min(em / MAX_EM, MAX_WIDTH * LARGE_PX / (right - left))
    # The middle of the letter's baseline on the canvas and in the image.
    source_x, source_y = (left + right) / 2, 2.0 * em_px
    target_x, target_y = (0.5 + shift_x) * LARGE_PX, (BASELINE + shift_y) * LARGE_PX
    # From a point of the image to one of the canvas: the inverse of rotation @ [[1, shear], [0, 1]]
    # * scale. Rounded, since the last digit of a sine differs between C libraries.
    cos, sin = math.cos(angle) / scale, math.sin(angle) / scale
    a, b = round(cos + shear * sin, 6), round(sin - shear * cos, 6)
    d, e = round(-sin, 6), round(cos, 6)
    c = round(source_x - a * target_x - b * target_y, 6)
    f = round(source_y - d * target_x - e * target_y, 6)
    size, affine = (LARGE_PX, LARGE_PX), Image.Transform.AFFINE
    large = canvas.transform(size, affine, (a, b, c, d, e, f), resample=Image.Resampling.BICUBIC)
    file = io.BytesIO()
    large.reduce(2).convert("RGB").save(file, format="PNG")
    return file.getvalue()


@cache
def _open_font(font: str, em_px: int) -> ImageFont.FreeTypeFont:
    import matplotlib

    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{font}.ttf"
    if not path.is_file():
        raise UserError(
            "this font of matplotlib's wheel does not exist",
            where=str(path),
            next_step="pip install --force-reinstall matplotlib",
        )
    # The basic layout needs no further library and is the same everywhere.
    return ImageFont.truetype(path, em_px, layout_engine=ImageFont.Layout.BASIC)
