"""Which images of a folder the demo takes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launch.demo import copy_some, corpus_of
from vitscale.config.errors import UserError


def taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    monkeypatch.setattr("launch.demo.ROOT", folder.parent)
    corpus = corpus_of(str(folder))
    copy_some(corpus)
    copy_some(corpus)  # resumed
    return {path.name: len(list(path.iterdir())) for path in corpus.images.iterdir()}


@pytest.mark.parametrize("top", ["", "train/"])
def test_at_most_200_images_of_each_class_are_taken(
    top: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, num in (("cat", 450), ("dog", 3), (".cache", 2)):
        for number in range(num):
            path = tmp_path / "in" / top / name / f"sub/{number}.JPEG"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    (tmp_path / "in" / top / "cat/notes.txt").touch()
    if top:
        (tmp_path / "in/val").mkdir()
        (tmp_path / "in/val/flat.JPEG").touch()
    assert taken(tmp_path / "in", monkeypatch) == {"cat": 150, "dog": 3}


def test_a_folder_on_another_file_system_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in/cat").mkdir(parents=True)
    (tmp_path / "in/cat/1.png").write_bytes(b"image")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(18, os.strerror(18))

    monkeypatch.setattr("os.link", refuse)
    assert taken(tmp_path / "in", monkeypatch) == {"cat": 1}


def test_a_folder_without_classes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/1.png").touch()
    with pytest.raises(UserError, match="no class folders with images"):
        taken(tmp_path / "in", monkeypatch)
