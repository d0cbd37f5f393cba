"""The README of a shard folder."""

from __future__ import annotations

from pathlib import Path

import yaml

from data_prep.formats.index_files import CARD_NAME, write_card

# Line separators of Unicode, what YAML takes for another value, and quotes.
AWKWARD = ["a\u2028b", "a\x85b", "no", "1", "", " x ", "\u00e9\U0001f600", "'\"", "- #"]


def test_class_names_are_read_back(tmp_path: Path) -> None:
    write_card(tmp_path, splits={}, classes=AWKWARD, formats=["png"])
    front = yaml.safe_load((tmp_path / CARD_NAME).read_text().split("---\n")[1])
    image, label, *_ = front["dataset_info"]["features"]
    assert image == {"name": "png", "dtype": "image"}
    assert list(label["dtype"]["class_label"]["names"].values()) == AWKWARD
