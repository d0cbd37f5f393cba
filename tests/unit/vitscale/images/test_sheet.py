"""Captions of pictures."""

from __future__ import annotations

from vitscale.images.sheet import caption


def test_a_long_name_keeps_its_end() -> None:
    assert caption("cat", width=3) == "cat"
    assert caption("letter_a_with_acute", width=9) == "…th_acute"
