from __future__ import annotations

import os
from pathlib import Path

import pytest

from data_prep.image_folder import class_names, scan_image_folder
from vitscale.errors import UserError
from vitscale.runs.data_prep import SourceSettings


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def test_files_come_in_the_order_of_their_paths_bytes(tmp_path: Path) -> None:
    names = [f"{c}/{i}.jpg" for c in ("dog", "cat", "Eel", "é") for i in (3, 10, 1, 2)]
    touch(tmp_path, *names, "cat/sub/1.jpg", "cat-2/1.jpg")
    files = scan_image_folder(SourceSettings(path=str(tmp_path)))
    paths = [file.path for file in files]
    assert paths == sorted(paths, key=os.fsencode) and len(paths) == 18
    assert class_names(files) == ("Eel", "cat", "cat-2", "dog", "é")


def test_labels_are_over_the_union_of_all_splits(tmp_path: Path) -> None:
    touch(tmp_path, "a/train/cat/1.jpg", "a/val/dog/1.jpg", "a/val/cat/2.jpg", "a/other/x/1.jpg")
    source = SourceSettings(path=str(tmp_path), splits={"train": "a/train", "test": "a/val"})
    files = scan_image_folder(source)
    assert class_names(files) == ("cat", "dog")
    assert {(file.path, file.split) for file in files} == {
        ("a/train/cat/1.jpg", "train"),
        ("a/val/cat/2.jpg", "test"),
        ("a/val/dog/1.jpg", "test"),
    }


@pytest.mark.parametrize(
    "splits, message",
    [
        ({"train": "train", "test": "gone"}, "source.splits.test.*no such folder"),
        ({"train": "train", "test": "../beside"}, "source.splits.test.*lies outside"),
        ({"train": "train", "test": "train"}, "two splits share files"),
    ],
)
def test_split_folders_that_cannot_be_used_are_refused(
    splits: dict[str, str], message: str, tmp_path: Path
) -> None:
    touch(tmp_path, "source/train/cat/1.jpg", "beside/cat/1.jpg")
    with pytest.raises(UserError, match=message):
        scan_image_folder(SourceSettings(path=str(tmp_path / "source"), splits=splits))
