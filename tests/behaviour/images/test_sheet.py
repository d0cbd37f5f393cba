"""Sheets of small images: the text above each row."""

from __future__ import annotations

from PIL import Image

from vitscale.images.sheet import draw_rows


def test_names_have_their_umlauts(tmp_path):
    """Each letter looks like itself, and not like one that the font lacks."""
    # The last one is no character, which fonts draw as a box.
    letters = "aäöüßéøłžΩж\uffff"
    path = tmp_path / "sheet.png"
    drawn = set()
    for letter in letters:
        draw_rows(path, [(letter, [b"no image"])])
        with Image.open(path) as image:
            drawn.add(image.tobytes())
    assert len(drawn) == len(letters)
