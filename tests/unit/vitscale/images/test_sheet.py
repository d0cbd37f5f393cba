"""Captions of pictures."""

from __future__ import annotations

from vitscale.images.sheet import caption


def test_a_long_name_is_broken_between_words_and_shortened_in_the_middle() -> None:
    assert caption("cat", width=3) == "cat"
    assert caption("letter", width=4) == "le…r"
    name = "capital_letter_a_with_acute"
    assert caption(name, width=16, num_lines=2) == "capital letter a\nwith acute"
    assert caption(name, width=15) == "capital…h acute"
    assert caption("abcdefgh-ij", width=4, num_lines=3) == "abcd\nefgh\n-ij"
