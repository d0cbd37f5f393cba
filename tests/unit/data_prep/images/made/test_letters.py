from __future__ import annotations

import pytest

from data_prep.images.made.letters import (
    FONTS,
    TEST_FONTS,
    choose_letters,
    class_name,
    font_letters,
    without_doubles,
)
from vitscale.config.errors import UserError


def chosen(*sets: str, min_fonts: int = 16) -> dict[str, list[str]]:
    return choose_letters(sets, min_fonts=min_fonts, test_fonts=TEST_FONTS)


def test_every_font_has_the_latin_alphabet() -> None:
    alphabet = {chr(code) for code in (*range(65, 91), *range(97, 123))}
    assert all(alphabet <= font_letters(font) for font in FONTS)
    assert len(FONTS) == 16


def test_greek_letters_that_look_latin_are_left_out() -> None:
    assert {"Α", "Γ", "ω"} <= set(chosen("greek"))
    fonts = list(FONTS)
    assert list(without_doubles(dict.fromkeys("AΑΓ", fonts))) == ["A", "Γ"]


def test_letters_have_the_least_number_of_fonts() -> None:
    few, many = chosen("cyrillic"), chosen("cyrillic", min_fonts=12)
    assert set(few) < set(many)
    assert all(len(fonts) == 16 for fonts in few.values())
    assert min(len(fonts) for fonts in many.values()) == 12


def test_accented_letters_are_latin_with_a_mark() -> None:
    letters = set(chosen("accented"))
    assert {"é", "Ů", "ç"} <= letters and not letters & {"e", "ø", "ά"}


def test_western_letters_are_the_53_of_latin_1() -> None:
    letters = chosen("western")
    assert len(letters) == 53 and set(letters) < set(chosen("accented"))
    assert {"À", "ÿ"} <= set(letters) and not {"ß", "Ø", "ā"} & set(letters)


def test_class_names_are_plain_file_names() -> None:
    names = [class_name(letter) for letter in chosen("cyrillic")]
    assert class_name("é") == "latin_small_letter_e_with_acute"
    assert len(set(names)) == len(names)
    assert all(
        name.isascii() and name.replace("_", "").replace("-", "").isalnum() for name in names
    )


def test_no_letters_for_the_test_fonts_is_an_error() -> None:
    with pytest.raises(UserError, match="0 letters of cyrillic are in 16 fonts"):
        choose_letters(["cyrillic"], min_fonts=16, test_fonts=[])
