"""Make the characters corpus: letters rendered from the fonts in matplotlib's wheel.

Images of one letter differ in font, size, position, rotation, shear, stroke and grey levels, all
drawn from the seed. The test images are rendered from fonts that no training image has.

The bytes depend on the fonts (matplotlib's version) and on Pillow's version, whose wheel holds
FreeType and zlib; equal versions give equal bytes.
"""

from __future__ import annotations

import io
import math
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from vitscale.config.errors import UserError
from vitscale.distributed.random_numbers import CounterRandom, stream_key

# The fonts of the wheel with Latin, Greek and Cyrillic letters; the others are for mathematics.
FONTS = (
    *(f"DejaVuSans{style}" for style in ("", "-Bold", "-BoldOblique", "-Oblique")),
    *(f"DejaVuSansMono{style}" for style in ("", "-Bold", "-BoldOblique", "-Oblique")),
    *(f"DejaVuSerif{style}" for style in ("", "-Bold", "-BoldItalic", "-Italic")),
    *(f"STIXGeneral{style}" for style in ("", "Bol", "BolIta", "Italic")),
)
# Every family and every style once.
TEST_FONTS = ("DejaVuSans-BoldOblique", "DejaVuSansMono-Oblique", "DejaVuSerif-Bold", "STIXGeneral")
# Pixels per em at which drawings are compared.
COMPARED_EM_PX = 40
SETS: dict[str, Callable[[str], bool]] = {
    "latin": lambda letter: _script(letter) == "LATIN",
    "accented": lambda letter: _script(letter) == "LATIN" and _has_mark(letter),
    # The accented letters of ISO 8859-1.
    "western": lambda letter: letter <= "\u00ff" and _has_mark(letter),
    "greek": lambda letter: _script(letter) == "GREEK",
    "cyrillic": lambda letter: _script(letter) == "CYRILLIC",
    "all": lambda letter: True,
}
# fixed: white letters on black.
GREY_LEVELS = ("random", "fixed")

# Letters are drawn large, then transformed at twice the size of the image, then halved.
OVERSAMPLING = 2
MAX_EM = 0.66  # em per side of the image, leaves room for accents on capitals
MIN_EM = 0.54
MAX_WIDTH = 0.8  # of the image
BASELINE = 0.72  # below the upper border
JITTER = 0.04
ROTATION_DEGREES = 8.0
SHEAR = 0.12
MAX_STROKE = 0.02  # added to either side of a line, per side of the image
MIN_CONTRAST = 80


@dataclass(frozen=True, kw_only=True)
class Characters:
    """What the corpus holds. Numbers of images are per letter."""

    sets: Sequence[str] = ("latin",)
    num_train: int = 60
    num_test: int = 8
    side_px: int = 48
    grey_levels: str = "random"
    seed: int = 0


def character_files(corpus: Characters) -> Iterator[tuple[str, bytes]]:
    """{train,test}/LETTER/FONT-NNN.png and contents. The fonts of a letter take turns."""
    trained = [font for font in FONTS if font not in TEST_FONTS]
    parts = (("train", trained, corpus.num_train), ("test", TEST_FONTS, corpus.num_test))
    for letter in choose_letters(corpus.sets):
        for split, choice, num_images in parts:
            for i in range(num_images):
                font = choice[i % len(choice)]
                key = stream_key("characters", corpus.seed, letter, font, i)
                png = render(letter, font, corpus, random=CounterRandom(key))
                yield f"{split}/{class_name(letter)}/{font}-{i:03d}.png", png


def choose_letters(sets: Sequence[str]) -> list[str]:
    """The lower- and upper-case letters of `sets` that all fonts have, by code point.

    A letter has a drawing of its own: of Latin A, Greek Alpha and Cyrillic A the first is kept.
    Letters that most fonts draw like an earlier letter, or not at all, are left out.
    """
    common = frozenset.intersection(*map(_letters_of, FONTS))
    seen: dict[str, set[bytes]] = {font: {b""} for font in FONTS}
    kept = []
    for letter in sorted(common):
        if not any(SETS[name](letter) for name in sets):
            continue
        drawings = {font: _drawing(font, letter) for font in FONTS}
        if 2 * sum(drawing in seen[font] for font, drawing in drawings.items()) <= len(FONTS):
            kept.append(letter)
            for font, drawing in drawings.items():
                seen[font].add(drawing)
    return kept


def class_name(letter: str) -> str:
    """The letter's Unicode name, which is a file name everywhere: latin_small_letter_a."""
    return unicodedata.name(letter).lower().replace(" ", "_")


def render(letter: str, font: str, corpus: Characters, *, random: CounterRandom) -> bytes:
    """One RGB PNG of `corpus.side_px` pixels a side."""
    em = random.uniform(MIN_EM, MAX_EM)
    angle = math.radians(random.uniform(-ROTATION_DEGREES, ROTATION_DEGREES))
    shear = random.uniform(-SHEAR, SHEAR)
    shift = random.uniform(-JITTER, JITTER), random.uniform(-JITTER, JITTER)
    stroke = random.uniform(-MAX_STROKE, MAX_STROKE)  # half of the letters keep their own
    paper, ink = _random_levels(random) if corpus.grey_levels == "random" else (0, 255)

    large_px = OVERSAMPLING * corpus.side_px
    em_px = round(MAX_EM * large_px)
    stroke_px = round(max(0.0, stroke) * large_px)
    canvas = _drawn(font, letter, em_px, size=(4 * em_px, 3 * em_px), stroke_width=stroke_px)
    left, _, right, _ = canvas.getbbox() or (0, 0, 1, 1)
    scale = min(em / MAX_EM, MAX_WIDTH * large_px / (right - left))
    # The middle of the letter's baseline on the canvas and in the image.
    source = (left + right) / 2, 2.0 * em_px
    target = (0.5 + shift[0]) * large_px, (BASELINE + shift[1]) * large_px
    mask = canvas.transform(
        (large_px, large_px),
        Image.Transform.AFFINE,
        _inverse_affine(scale, angle, shear, source=source, target=target),
        resample=Image.Resampling.BICUBIC,
    ).reduce(OVERSAMPLING)
    table = [round(paper + (ink - paper) * level / 255) for level in range(256)]
    file = io.BytesIO()
    mask.point(table).convert("RGB").save(file, format="PNG")
    return file.getvalue()


def _random_levels(random: CounterRandom) -> tuple[int, int]:
    """(paper, ink), at least MIN_CONTRAST apart; either may be the lighter one."""
    dark, light = sorted(int(random.uniform(0, 256 - MIN_CONTRAST)) for _ in range(2))
    light += MIN_CONTRAST
    return (dark, light) if random.uniform() < 0.5 else (light, dark)


def _inverse_affine(
    scale: float,
    angle: float,
    shear: float,
    *,
    source: tuple[float, float],
    target: tuple[float, float],
) -> tuple[float, float, float, float, float, float]:
    """Coefficients that take a point of the image to a point of the canvas, as Pillow wants them.

    The letter is scaled, sheared and rotated, in this order, about `source`, which comes to lie on
    `target`.
    """
    cos, sin = math.cos(angle) / scale, math.sin(angle) / scale
    # The inverse of rotation @ [[1, shear], [0, 1]] * scale.
    a, b, d, e = cos + shear * sin, sin - shear * cos, -sin, cos
    # Rounded, since the last digit of a sine differs between C libraries.
    a, b, d, e = (round(value, 6) for value in (a, b, d, e))
    c = round(source[0] - a * target[0] - b * target[1], 6)
    f = round(source[1] - d * target[0] - e * target[1], 6)
    return a, b, c, d, e, f


def _drawing(font: str, letter: str) -> bytes:
    """The pixels of a letter on its baseline; b"" if it has none."""
    canvas = _drawn(font, letter, COMPARED_EM_PX, size=(3 * COMPARED_EM_PX, 3 * COMPARED_EM_PX))
    return canvas.tobytes() if canvas.getbbox() else b""


def _drawn(
    font: str, letter: str, em_px: int, *, size: tuple[int, int], stroke_width: int = 0
) -> Image.Image:
    """A white letter whose baseline begins at (1 em, 2 em)."""
    canvas = Image.new("L", size)
    ImageDraw.Draw(canvas).text(
        (em_px, 2 * em_px),
        letter,
        fill=255,
        font=_open_font(font, em_px),
        anchor="ls",
        stroke_width=stroke_width,
    )
    return canvas


def _script(letter: str) -> str:
    return unicodedata.name(letter).split(" ", 1)[0]


def _has_mark(letter: str) -> bool:
    return len(unicodedata.normalize("NFD", letter)) > 1


def _letters_of(font: str) -> frozenset[str]:
    """The lower- and upper-case letters of a font, without compatibility forms (U+212B, say)."""
    from matplotlib.ft2font import FT2Font

    return frozenset(
        letter
        for letter in map(chr, FT2Font(str(_font_file(font))).get_charmap())
        if unicodedata.category(letter) in ("Lu", "Ll")
        and unicodedata.normalize("NFKC", letter) == letter
    )


@cache
def _open_font(font: str, em_px: int) -> ImageFont.FreeTypeFont:
    # The basic layout needs no further library and is the same everywhere.
    return ImageFont.truetype(_font_file(font), em_px, layout_engine=ImageFont.Layout.BASIC)


def _font_file(font: str) -> Path:
    import matplotlib

    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{font}.ttf"
    if not path.is_file():
        raise UserError(
            "this font of matplotlib's wheel does not exist",
            where=str(path),
            next_step="pip install --force-reinstall matplotlib",
        )
    return path
