"""Sheets of small images: the text above each row."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from vitscale.images.sheet import draw_rows


def test_names_have_their_umlauts(tmp_path: Path) -> None:
    """Each letter looks like itself, and not like one that the font lacks."""
    drawn = set()
    letters = "aäöüßéøłžΩж\uffff"
    for letter in letters:
        draw_rows(tmp_path / "sheet.png", [(letter, [b"no image"])])
        with Image.open(tmp_path / "sheet.png") as image:
            drawn.add(image.tobytes())
    assert len(drawn) == len(letters)
