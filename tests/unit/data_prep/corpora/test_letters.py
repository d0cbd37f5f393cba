from __future__ import annotations

from data_prep.corpora.letters import (
    FONTS,
    choose_letters,
    class_name,
    font_letters,
    without_doubles,
)


def chosen(*sets: str) -> list[str]:
    return choose_letters(sets)


def test_every_font_has_the_latin_alphabet() -> None:
    alphabet = {chr(code) for code in (*range(65, 91), *range(97, 123))}
    assert all(alphabet <= font_letters(font) for font in FONTS)
    assert len(FONTS) == 16


def test_greek_letters_that_look_latin_are_left_out() -> None:
    assert {"Α", "Γ", "ω"} <= set(chosen("greek"))
    assert without_doubles("AΑΓ") == ["A", "Γ"]


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
