"""Which images of a folder the demo takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.demo import link_some
from vitscale.config.errors import UserError


def test_at_most_200_images_of_each_class_are_taken(tmp_path: Path) -> None:
    for name, num in (("cat", 450), ("dog", 3), (".cache", 2)):
        (tmp_path / "in" / name / "sub").mkdir(parents=True)
        for number in range(num):
            (tmp_path / "in" / name / f"sub/{number}.JPEG").touch()
    (tmp_path / "in/cat/notes.txt").touch()
    for _ in range(2):  # started, resumed
        link_some(tmp_path / "in", tmp_path / "out")
        taken = {path.name: len(list(path.iterdir())) for path in (tmp_path / "out").iterdir()}
        assert taken == {"cat": 150, "dog": 3}


def test_a_folder_without_classes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/1.png").touch()
    for name in ("in", "none"):
        with pytest.raises(UserError, match="no class folders with images"):
            link_some(tmp_path / name, tmp_path / "out")
