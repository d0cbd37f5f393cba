"""Choose the classes of the characters corpus: letters of the fonts in matplotlib's wheel.

Owns: which fonts are used, which letters each has, the sets of letters, letters that look alike.
Leaves out: rendering images (`characters.py`).
"""

from __future__ import annotations

import unicodedata
from collections import Counter
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


def choose_letters(
    sets: Sequence[str], *, min_fonts: int, test_fonts: Sequence[str]
) -> dict[str, list[str]]:
    """Letter -> its fonts, for the lower- and upper-case letters of `sets`, by code point.

    A letter has at least `min_fonts` fonts, of them one for training and one for testing, and a
    drawing of its own: of Latin A, Greek Alpha and Cyrillic A the first is kept.
    Raises UserError if fewer than two letters are left.
    """
    letters_of = {font: font_letters(font) for font in FONTS}
    found: dict[str, list[str]] = {}
    for letter in sorted(set().union(*letters_of.values())):
        fonts = [font for font in FONTS if letter in letters_of[font]]
        tested = set(fonts) & set(test_fonts)
        enough = len(fonts) >= min_fonts and tested and len(tested) < len(fonts)
        if enough and any(SETS[name](letter) for name in sets):
            found[letter] = fonts
    chosen = without_doubles(found)
    if len(chosen) < 2:
        raise UserError(
            f"{len(chosen)} letters of {', '.join(sets)} are in {min_fonts} fonts, "
            "in test fonts and in others",
            allowed="at least 2",
            next_step="choose more sets or fewer fonts",
        )
    return chosen


def without_doubles(fonts_of: dict[str, list[str]]) -> dict[str, list[str]]:
    """Leave out letters that most of their fonts draw like an earlier letter, or not at all."""
    seen: dict[str, set[bytes]] = {font: {b""} for font in FONTS}
    kept = {}
    for letter, fonts in fonts_of.items():
        drawings = {font: _drawing(font, letter) for font in fonts}
        known = Counter(drawing in seen[font] for font, drawing in drawings.items())
        if known[True] * 2 <= len(fonts):
            kept[letter] = fonts
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
