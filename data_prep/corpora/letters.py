"""Choose the classes of the characters corpus: letters of the fonts in matplotlib's wheel.

Owns: which fonts are used, which letters each has, the sets of letters, letters that look alike.
Leaves out: rendering images (`characters.py`).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from vitscale.config.errors import UserError

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


def choose_letters(sets: Sequence[str]) -> list[str]:
    """The lower- and upper-case letters of `sets` that all fonts have, by code point.

    A letter has a drawing of its own: of Latin A, Greek Alpha and Cyrillic A the first is kept.
    """
    common = frozenset.intersection(*map(font_letters, FONTS))
    return without_doubles(
        [letter for letter in sorted(common) if any(SETS[name](letter) for name in sets)]
    )


def without_doubles(letters: Sequence[str]) -> list[str]:
    """Leave out letters that most fonts draw like an earlier letter, or not at all."""
    seen: dict[str, set[bytes]] = {font: {b""} for font in FONTS}
    kept = []
    for letter in letters:
        drawings = {font: _drawing(font, letter) for font in FONTS}
        if 2 * sum(drawing in seen[font] for font, drawing in drawings.items()) <= len(FONTS):
            kept.append(letter)
            for font, drawing in drawings.items():
                seen[font].add(drawing)
    return kept


def _drawing(font: str, letter: str) -> bytes:
    """The pixels of a letter on its baseline; b"" if it has none."""
    canvas = Image.new("L", (3 * COMPARED_EM_PX, 3 * COMPARED_EM_PX))
    origin = (COMPARED_EM_PX, 2 * COMPARED_EM_PX)
    ImageDraw.Draw(canvas).text(
        origin, letter, fill=255, font=open_font(font, COMPARED_EM_PX), anchor="ls"
    )
    return canvas.tobytes() if canvas.getbbox() else b""


def class_name(letter: str) -> str:
    """The letter's Unicode name, which is a file name everywhere: latin_small_letter_a."""
    return unicodedata.name(letter).lower().replace(" ", "_")


def _script(letter: str) -> str:
    return unicodedata.name(letter).split(" ", 1)[0]


def _has_mark(letter: str) -> bool:
    return len(unicodedata.normalize("NFD", letter)) > 1


def font_letters(font: str) -> frozenset[str]:
    """The lower- and upper-case letters of a font, without compatibility forms (U+212B, say)."""
    from matplotlib.ft2font import FT2Font

    found = map(chr, FT2Font(str(font_file(font))).get_charmap())
    return frozenset(
        letter
        for letter in found
        if unicodedata.category(letter) in ("Lu", "Ll")
        and unicodedata.normalize("NFKC", letter) == letter
    )


@cache
def open_font(font: str, em_px: int) -> ImageFont.FreeTypeFont:
    # The basic layout needs no further library and is the same everywhere.
    return ImageFont.truetype(font_file(font), em_px, layout_engine=ImageFont.Layout.BASIC)


def font_file(font: str) -> Path:
    import matplotlib

    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{font}.ttf"
    if not path.is_file():
        raise UserError(
            "this font of matplotlib's wheel does not exist",
            where=str(path),
            next_step="pip install --force-reinstall matplotlib",
        )
    return path
