from __future__ import annotations

import io
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from data_prep.corpora import characters
from data_prep.corpora.characters import (
    FONTS,
    TEST_FONTS,
    Characters,
    character_files,
    choose_letters,
    class_name,
    render,
)
from vitscale.distributed.random_numbers import CounterRandom

SMALL = Characters(sets=["greek"], num_train=13, num_test=5, side_px=16)


@pytest.fixture
def three_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(characters, "choose_letters", lambda sets: list("Γωά"))


def pixels(letter: str, font: str, *, key: int, grey_levels: str = "random") -> np.ndarray:
    """float [48, 48]"""
    corpus = Characters(grey_levels=grey_levels)
    png = render(letter, font, corpus, random=CounterRandom(key))
    with Image.open(io.BytesIO(png)) as image:
        assert (image.mode, image.size) == ("RGB", (48, 48))
        return np.asarray(image)[..., 0].astype(float)


@pytest.mark.usefixtures("three_letters")
def test_fonts_take_turns_and_test_fonts_are_apart() -> None:
    files = [name.split("/") for name, _ in character_files(SMALL)]
    counts = Counter((split, label, name[:-8]) for split, label, name in files)
    of_train = {font: n for (split, label, font), n in counts.items() if split == "train"}
    of_test = {font: n for (split, label, font), n in counts.items() if split == "test"}
    assert set(of_test) == set(TEST_FONTS) and set(of_train) == set(FONTS) - set(TEST_FONTS)
    assert sorted(of_train.values()) == [1] * 11 + [2]
    assert len({label for _, label, _ in files}) == 3
    assert len(files) == 3 * (13 + 5)


def test_letters_lie_inside_and_stand_out() -> None:
    """Also the widest letter, and capitals with marks above and below."""
    for letter in "ЉẄǄĢj":
        for key in range(8):
            image = pixels(letter, "DejaVuSans-Bold", key=key)
            border = np.concatenate([image[0], image[-1], image[:, 0], image[:, -1]])
            assert np.ptp(border) <= np.ptp(image) / 4
            assert np.ptp(image) >= 60


def test_either_of_paper_and_ink_may_be_lighter() -> None:
    borders = [pixels("Γ", "STIXGeneral", key=key)[0, 0] for key in range(40)]
    middles = [np.median(pixels("Γ", "STIXGeneral", key=key)) for key in range(40)]
    assert borders == middles  # most of the image is paper
    assert min(borders) < 80 and max(borders) > 175


def test_fixed_levels_are_white_on_black() -> None:
    images = [pixels("Γ", "STIXGeneralBol", key=key, grey_levels="fixed") for key in range(8)]
    assert all((image[0, 0], image.max()) == (0, 255) for image in images)


def test_sets_hold_letters_with_drawings_of_their_own() -> None:
    every = choose_letters(["all"])
    assert {"A", "é", "Ů", "Γ", "ω"} <= set(every) and "Α" not in every  # Greek, like Latin
    western = choose_letters(["western"])
    assert len(western) == 53 and {"À", "ÿ"} <= set(western) and not {"ß", "Ø"} & set(western)
    assert class_name("é") == "latin_small_letter_e_with_acute"
    names = [class_name(letter) for letter in every]
    assert len(set(names)) == len(names)
    assert all(name.isascii() and not set(name) & set("/. ") for name in names)
