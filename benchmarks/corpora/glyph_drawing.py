"""Draw Chinese characters or shapes, as a function of class, number and seed.

Owns: fonts, radicals, and drawing one picture.
Leaves out: folders, tars and faults (`glyph_corpus`, `planted_faults`).

The 20,992 characters U+4E00..U+9FFF are about as many classes as ImageNet-21k has, the 214 radicals
make a hierarchy, and nothing has to be downloaded but fonts. Shapes need no fonts at all.
"""

from __future__ import annotations

import bz2
import io
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from vitscale.config.errors import UserError

FIRST, LAST = 0x4E00, 0x9FFF
NUM_CLASSES = LAST - FIRST + 1
# One face per package; the Droid family's second file draws the same characters.
FONTS = {
    "/usr/share/fonts/truetype/arphic/ukai.ttc": "fonts-arphic-ukai",
    "/usr/share/fonts/truetype/arphic/uming.ttc": "fonts-arphic-uming",
    "/usr/share/fonts/truetype/wqy/wqy-zenhei.ttc": "fonts-wqy-zenhei",
    "/usr/share/fonts/truetype/wqy/wqy-microhei.ttc": "fonts-wqy-microhei",
    "/usr/share/fonts/truetype/babelstone/BabelStoneHan.ttf": "fonts-babelstone-han",
    "/usr/share/fonts/truetype/droid/DroidSansFallbackFull.ttf": "fonts-droid-fallback",
}
# Debian's unicode-data 15; kRSUnicode moved to this file with Unicode 15.
UNIHAN = "/usr/share/unicode/Unihan_IRGSources.txt.bz2"
NUM_RADICALS = 214
GLYPH_SHARES = (0.60, 0.68, 0.76, 0.84)
"""Heights of a character, in parts of the picture's side."""
MAX_SHIFT = 0.06
MAX_TURN_DEG = 8.0


def class_name(number: int) -> str:
    """Class 0 is U4E00."""
    return f"U{FIRST + number:04X}"


def missing_packages() -> list[str]:
    """Missing apt packages with fonts and character data."""
    missing = [package for path, package in FONTS.items() if not Path(path).is_file()]
    return missing + ([] if Path(UNIHAN).is_file() else ["unicode-data"])


def require_packages() -> None:
    missing = missing_packages()
    if missing:
        raise UserError(
            "fonts or character data are not installed: " + ", ".join(missing),
            where="--drawing glyphs",
            next_step="apt-get install " + " ".join(missing) + "; or use --drawing shapes",
        )


def radicals() -> list[str]:
    """The super-class of each character: its radical in the Kangxi order, R001 to R214.

    "85.9" is radical 85 and 9 further strokes; "120'.3" is the simplified form of radical 120. A
    character with two readings belongs to the first.
    """
    with bz2.open(UNIHAN) as file:
        lines = re.findall(rb"^U\+([0-9A-F]+)\tkRSUnicode\t([0-9]+)", file.read(), re.MULTILINE)
    found = {int(code, 16): f"R{int(radical):03d}" for code, radical in lines}
    return [found[code] for code in range(FIRST, LAST + 1)]


def shape_groups() -> list[str]:
    """Super-classes of drawn shapes: neighbours of equal number."""
    return [f"R{1 + i * NUM_RADICALS // NUM_CLASSES:03d}" for i in range(NUM_CLASSES)]


@dataclass(frozen=True, slots=True)
class Look:
    """How the pictures of a corpus are made."""

    side: int = 64
    format: str = "png"
    seed: int = 0


def load_fonts() -> None:
    """Read the fonts' tables before processes are forked, once for all of them."""
    for path in FONTS:
        _characters_of(path)


@cache
def _characters_of(path: str) -> frozenset[int]:
    from fontTools.ttLib import TTFont  # type: ignore[import-untyped]  # has no type information

    # A character outside a font's table would be drawn as an empty box.
    with TTFont(path, lazy=True, fontNumber=0) as font:
        return frozenset(font.getBestCmap())


@cache
def _font(path: str, size: int) -> ImageFont.FreeTypeFont:
    # The basic layout is a third faster, and single characters need no shaping.
    return ImageFont.truetype(path, size, layout_engine=ImageFont.Layout.BASIC)


def draw_glyph(number: int, position: int, look: Look) -> Image.Image:
    """Picture `position` of class `number`: the fonts that have the character take turns."""
    code = FIRST + number
    fonts = [path for path in FONTS if code in _characters_of(path)]
    rng = random.Random(f"{look.seed}/{code}/{position}")
    size = round(look.side * rng.choice(GLYPH_SHARES))
    ink, paper = rng.randrange(0, 90), rng.randrange(165, 256)
    image = Image.new("L", (look.side, look.side), paper)
    middle = look.side / 2
    shifts = [middle + look.side * rng.uniform(-MAX_SHIFT, MAX_SHIFT) for _ in range(2)]
    font = _font(fonts[position % len(fonts)], size)
    ImageDraw.Draw(image).text((shifts[0], shifts[1]), chr(code), ink, font, anchor="mm")
    turn = rng.uniform(-MAX_TURN_DEG, MAX_TURN_DEG)
    return image.rotate(turn, Image.Resampling.BILINEAR, fillcolor=paper)


def draw_shape(number: int, position: int, look: Look) -> Image.Image:
    """As `draw_glyph`, with a polygon that the class decides instead of a character."""
    corners = random.Random(f"shape/{number}")
    points = [(corners.random(), corners.random()) for _ in range(7)]
    rng = random.Random(f"{look.seed}/{number}/{position}")
    ink, paper = rng.randrange(0, 90), rng.randrange(165, 256)
    scale = look.side * rng.choice(GLYPH_SHARES)
    x, y = (look.side * (0.1 + rng.uniform(0, MAX_SHIFT)) for _ in range(2))
    image = Image.new("L", (look.side, look.side), paper)
    ImageDraw.Draw(image).polygon([(x + scale * a, y + scale * b) for a, b in points], fill=ink)
    turn = rng.uniform(-MAX_TURN_DEG, MAX_TURN_DEG)
    return image.rotate(turn, Image.Resampling.BILINEAR, fillcolor=paper)


DRAWINGS: dict[str, Callable[[int, int, Look], Image.Image]] = {
    "glyphs": draw_glyph,
    "shapes": draw_shape,
}
FORMATS: dict[str, dict[str, Any]] = {
    "png": {"format": "PNG", "compress_level": 3},
    "jpeg": {"format": "JPEG", "quality": 90},
}


def encode(image: Image.Image, format: str) -> bytes:
    file = io.BytesIO()
    image.save(file, **FORMATS[format])
    return file.getvalue()
