from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.sources.image_folder import ImageFolder
from data_prep.sources.protocol import Container
from tests.support.corpora.listing import MemorySpool, list_source
from vitscale.config.errors import UserError
from vitscale.runs.data_prep import LabelSettings, SourceSettings


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def folder(root: Path, **splits: str) -> ImageFolder:
    return ImageFolder(SourceSettings(path=str(root), splits=splits))


def fates(root: Path) -> dict[str, str | None]:
    return {row.path: row.reason for row in list_source(folder(root))}


def test_class_folders_are_sorted_by_bytes(tmp_path: Path) -> None:
    touch(tmp_path, *(f"{c}/1.jpg" for c in ("dog", "cat", "Eel", "é", "cat-2")), "cat/sub/2.jpg")
    boxes = folder(tmp_path).containers()
    assert [box.class_name for box in boxes] == [None, "Eel", "cat", "cat-2", "dog", "é"]
    assert [(row.path, row.class_name, row.name) for row in list_source(folder(tmp_path))] == [
        ("Eel/1.jpg", "Eel", "1"),
        ("cat/1.jpg", "cat", "1"),
        ("cat/sub/2.jpg", "cat", "sub/2"),
        ("cat-2/1.jpg", "cat-2", "1"),
        ("dog/1.jpg", "dog", "1"),
        ("é/1.jpg", "é", "1"),
    ]


def test_links_to_files_and_linked_classes_are_followed(tmp_path: Path) -> None:
    root = tmp_path / "source"
    touch(root, "cat/1.jpg", "cat/sub/2.jpg")
    touch(tmp_path, "beside/3.jpg")
    for link, target in {
        "cat/same.jpg": "1.jpg",
        "cat/gone.jpg": "nothing.jpg",
        "cat/up": "..",
        "cat/sub/self": ".",
        "cat/out.jpg": "../../beside/3.jpg",
        "cat/ring": "ring",
        "kitten": "cat/sub",
        "dog/cats": "../cat",
        "loose": "loose",
    }.items():
        (root / link).parent.mkdir(exist_ok=True)
        (root / link).symlink_to(target)
    assert fates(root) == {
        "cat/1.jpg": None,
        "cat/sub/2.jpg": None,
        "cat/same.jpg": None,
        "cat/gone.jpg": "link_broken",
        "cat/up": "linked_folder",
        "cat/sub/self": "linked_folder",
        "cat/out.jpg": None,
        "cat/ring": "link_broken",
        "kitten/2.jpg": None,
        "kitten/self": "linked_folder",
        "dog/cats": "linked_folder",
        "loose": "link_broken",
    }


@pytest.mark.parametrize(
    "splits, message",
    [
        ({"train": "train", "test": "gone"}, "source.splits.test.*no such folder"),
        ({"train": "train", "test": "../beside"}, "source.splits.test.*is outside"),
        ({"train": "train", "test": "train"}, "two splits share files"),
        ({"train": "train", "test": "train/cat"}, "two splits share files"),
        ({"train": "train", "test": "empty"}, "source.splits.test.*no class folders, but 1 image"),
    ],
)
def test_unusable_split_folders_are_refused(
    splits: dict[str, str], message: str, tmp_path: Path
) -> None:
    touch(tmp_path, "source/train/cat/1.jpg", "source/val/cat/1.jpg", "beside/cat/1.jpg")
    touch(tmp_path, "source/empty/1.jpg")
    with pytest.raises(UserError, match=message):
        folder(tmp_path / "source", **splits).containers()


def test_a_missing_class_folder_is_a_changed_source(tmp_path: Path) -> None:
    touch(tmp_path, "cat/1.jpg")
    with pytest.raises(UserError, match="'dog': changed while"):
        list(folder(tmp_path).inputs(Container("dog", "train", "dog"), spool=MemorySpool()))


NAMES = st.binary(min_size=1, max_size=251).filter(
    lambda raw: b"/" not in raw and b"\0" not in raw and not raw.startswith(b".")
)


@settings(max_examples=60, deadline=None)
@given(classes=st.sets(NAMES, min_size=1, max_size=3), files=st.sets(NAMES, max_size=4))
def test_any_file_name_is_listed_unchanged(
    tmp_path_factory: pytest.TempPathFactory, classes: set[bytes], files: set[bytes]
) -> None:
    root = tmp_path_factory.mktemp("names")
    expected = set()
    for class_name in classes:
        (root / os.fsdecode(b"c" + class_name)).mkdir()
        for file in files:
            path = os.fsdecode(b"c" + class_name + b"/" + file + b".jpg")
            (root / path).touch()
            expected.add((path, os.fsdecode(file)))
    rows = list_source(folder(root))
    assert {(row.path, row.name) for row in rows} == expected and len(rows) == len(expected)
    for row in rows:
        assert row.reason is None
        assert (row.class_name or "").encode() is not None  # valid UTF-8


def unlabelled(root: Path, **splits: str) -> ImageFolder:
    settings = SourceSettings(path=str(root), splits=splits)
    return ImageFolder(settings, LabelSettings(values="none"))


def test_without_classes_every_image_below_is_listed(tmp_path: Path) -> None:
    touch(tmp_path, "1.jpg", "a/1.jpg", "a/b/2.png", "a/notes.txt", ".h/3.jpg")
    rows = {
        row.path: (row.class_name, row.name, row.reason)
        for row in list_source(unlabelled(tmp_path))
    }
    assert rows == {
        "1.jpg": ("", "1", None),
        "a/1.jpg": ("", "a/1", None),
        "a/b/2.png": ("", "a/b/2", None),
        "a/notes.txt": ("", "a/notes", "other_name"),
        ".h/3.jpg": ("", ".h/3", "hidden"),
    }


def test_sub_folders_named_like_splits_are_splits(tmp_path: Path) -> None:
    touch(tmp_path, "Train/cat/1.jpg", "valid/cat/2.jpg", ".cache/x/3.jpg")
    rows = {row.path: (row.split, row.class_name) for row in list_source(folder(tmp_path))}
    assert rows == {"Train/cat/1.jpg": ("train", "cat"), "valid/cat/2.jpg": ("val", "cat")}
    assert {row.split for row in list_source(unlabelled(tmp_path))} == {"train", "val"}
    touch(tmp_path, "val/cat/3.jpg")
    with pytest.raises(UserError, match=r"named like splits \(Train, val, valid\)"):
        folder(tmp_path).containers()
    touch(tmp_path, "dog/4.jpg")
    assert {row.split for row in list_source(folder(tmp_path))} == {"train"}


KAGGLE = "ImageId,PredictionString\nv_2,dog 85 1 499 272\nv_1,cat 1 1 4 4 dog 1 2 3 4\n"


@pytest.mark.parametrize("text", [KAGGLE, "v_1.JPEG cat\nval/v_2.JPEG dog\n", "cat\ndog\n"])
def test_a_list_names_the_classes_of_loose_images(text: str, tmp_path: Path) -> None:
    touch(tmp_path, "in/train/cat/1.jpg", "in/train/dog/1.jpg", "in/train/loose.jpg")
    touch(tmp_path, "in/val/v_2.JPEG", "in/val/v_1.JPEG", "in/val/.v_0.JPEG", "in/val/note.txt")
    (tmp_path / "list").write_text(text)
    settings = SourceSettings(path=str(tmp_path / "in"), val_labels=str(tmp_path / "list"))
    rows = {row.path: (row.class_name, row.reason) for row in list_source(ImageFolder(settings))}
    assert rows == {
        "train/cat/1.jpg": ("cat", None),
        "train/dog/1.jpg": ("dog", None),
        "train/loose.jpg": (None, "no_class"),
        "val/v_1.JPEG": ("cat", None),
        "val/v_2.JPEG": ("dog", None),
        "val/.v_0.JPEG": (None, "hidden"),
        "val/note.txt": (None, "other_name"),
    }


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "3 image files(.|\n)*source.val_labels"),
        ("cat\ndog\n", "2 classes for 3 images"),
        ("a,cat\nb,dog\n", "names no image"),
    ],
)
def test_lists_that_do_not_fit_are_refused(text: str | None, message: str, tmp_path: Path) -> None:
    touch(tmp_path, "in/train/cat/1.jpg", *(f"in/val/{i}.jpg" for i in range(3)))
    (tmp_path / "list").write_text(text or "")
    listed = None if text is None else str(tmp_path / "list")
    with pytest.raises(UserError, match=message):
        ImageFolder(SourceSettings(path=str(tmp_path / "in"), val_labels=listed)).containers()
