"""Captions of pictures."""

from __future__ import annotations

from vitscale.images.sheet import caption, common_start


def test_a_long_name_is_broken_between_words_and_shortened_in_the_middle() -> None:
    assert caption("cat", width=3) == "cat"
    assert caption("letter", width=4) == "le…r"
    name = "capital_letter_a_with_acute"
    assert caption(name, width=16, num_lines=2) == "capital letter a\nwith acute"
    assert caption(name, width=15) == "capital…h acute"
    assert caption("abcdefgh-ij", width=4, num_lines=3) == "abcd\nefgh\n-ij"


def test_words_that_all_names_share_are_left_out() -> None:
    assert common_start(["latin_capital_a", "latin_capital_e", "latin_small_a"]) == "latin_"
    assert common_start(["latin_a", "lamp"]) == ""
    assert common_start(["cat", "cat"]) == ""
