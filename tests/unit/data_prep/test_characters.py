from __future__ import annotations

import io
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from data_prep.corpora import characters
from data_prep.corpora.characters import FONTS, LETTERS, TEST_FONTS, character_files, render
from vitscale.distributed.random_numbers import CounterRandom


def test_fonts_take_turns_and_test_fonts_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(LETTERS) == 53 and {"À", "ÿ"} <= set(LETTERS) and not {"ß", "Ø"} & set(LETTERS)
    monkeypatch.setattr(characters, "LETTERS", list("Àéÿ"))
    files = [name.split("/") for name, _ in character_files(num_train=13, num_test=5)]
    counts = Counter((split, label, name[:-8]) for split, label, name in files)
    of_train = {font: n for (split, label, font), n in counts.items() if split == "train"}
    of_test = {font: n for (split, label, font), n in counts.items() if split == "test"}
    assert set(of_test) == set(TEST_FONTS) and set(of_train) == set(FONTS) - set(TEST_FONTS)
    assert sorted(of_train.values()) == [1] * 11 + [2]
    assert {label for _, label, _ in files} == {
        "latin_capital_letter_a_with_grave",
        "latin_small_letter_e_with_acute",
        "latin_small_letter_y_with_diaeresis",
    }
    assert len(files) == 3 * (13 + 5)


def test_letters_lie_inside_and_stand_out() -> None:
    """Also a wide letter, and capitals with marks above and below."""
    for letter in "ÆÅÇj":
        for key in range(8):
            png = render(letter, "DejaVuSans-Bold", CounterRandom(key))
            with Image.open(io.BytesIO(png)) as image:
                assert (image.mode, image.size) == ("RGB", (48, 48))
                pixels = np.asarray(image)[..., 0].astype(float)
            border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
            assert border.max() <= 64 and pixels[0, 0] == 0 and pixels.max() >= 240
