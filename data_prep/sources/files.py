"""Find the folder or files of each split, classify names, and read lists of cells.

Leaves out: which folders are classes, and the content of tars and tables (one module per kind).
"""

from __future__ import annotations

import csv
import io
import os
import re
import stat
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import Any

from data_prep.sources.protocol import Container, printable, source_root
from vitscale.config.errors import UserError
from vitscale.config.text_files import read_text
from vitscale.data.webdataset import matching
from vitscale.runs.data_prep import SourceSettings

# Files with these names are opened and checked. Unsupported formats are included, so that a folder
# of .bmp files is reported as unsupported images and not ignored as other files.
IMAGE_SUFFIXES = frozenset(
    "jpg jpeg jpe jfif mpo png apng webp bmp gif tif tiff heic heif avif jp2 ppm".split()
)
TAR_SUFFIX = re.compile(r"\.(tar(\.(gz|xz|zst|bz2|lz4))?|tgz|txz)$", re.IGNORECASE)

DELIMITERS = {".csv": ",", ".tsv": "\t"}
# The keywords by which Hugging Face `datasets` recognises splits.
SPLIT_OF_NAME = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation", "holdout"), "test"),
}
# Parts of other names of splits, such as seg_train, trainset, PublicTest, test2, val_images.
OF_TRAIN, OF_OTHERS = re.compile("train", re.I), re.compile("val|dev|test|hold", re.I)
NAMES_SHOWN = 10


def key_of(split: str, settings: SourceSettings) -> str:
    """The setting that names the place of a split."""
    return f"source.splits.{split}" if settings.splits else "source.path"


def split_places(settings: SourceSettings, *, kind: str) -> dict[str, str]:
    """Return the folder, file or pattern of each split, relative to the root; empty: the root.

    kind: what a place may be: `folder`, or `file or folder`, which may also be a pattern. Raises
    UserError for a missing source, paths outside and splits that share files.
    """
    top = Path(settings.path).expanduser()
    may_be_file = kind != "folder"
    if not (top.is_dir() or (may_be_file and top.is_file())):
        raise UserError(f"{settings.path!r}: no such {kind}", where="source.path")
    if top.is_file():
        if settings.splits:
            raise UserError("needs a folder as source.path", where="source.splits")
        return {"train": top.name}
    if not settings.splits:
        return {"train": ""}
    places: dict[str, str] = {}
    for split, path in settings.splits.items():
        path, where = os.path.normpath(path), key_of(split, settings)
        full = top / path
        if os.path.isabs(path) or path.split("/")[0] == "..":
            raise UserError(f"{str(full)!r} is outside source.path", where=where)
        is_pattern = not {"*", "?", "{"}.isdisjoint(full.name) and full.parent.is_dir()
        if not (full.is_dir() or (may_be_file and (full.is_file() or is_pattern))):
            raise UserError(f"{str(full)!r}: no such {kind}", where=where)
        for other, other_path in places.items():
            a, b = full.resolve(), (top / other_path).resolve()
            if a.is_relative_to(b) or b.is_relative_to(a):  # it would store an image twice
                what = f"two splits share files ({other} and {split})"
                raise UserError(what, where="source.splits", allowed="separate folders")
        places[split] = "" if path == "." else path
    return places


def file_containers(
    settings: SourceSettings, is_wanted: Callable[[str], bool], *, kind: str
) -> list[Container]:
    """List the files of each split: one file, all wanted ones of a folder, or those of a pattern.

    kind: what such files are called in messages, plural. Raises UserError.
    """
    root, found = source_root(settings), []
    for split, path in split_places(settings, kind="file or folder").items():
        full, where = root / path, key_of(split, settings)
        folder = path if full.is_dir() else os.path.dirname(path)
        with os.scandir(root / folder) as entries:
            names = {entry.name for entry in entries if is_wanted(entry.name) and entry.is_file()}
        like, missing = "", set[str]()
        if not full.is_dir():
            like = f" matching {full.name!r}"
            wanted = matching(full.name, names, where=where)
            names, missing = names & wanted, wanted - names
        if not names:
            what = f"{printable(str(root / folder))!r} contains no {kind}{like}"
            raise UserError(what, where=where)
        if missing:
            what = f"has no {min(missing)!r}, which the pattern names"
            advice = "get the missing files, or correct the pattern"
            raise UserError(what, where=where, next_step=advice)
        by_name = {}
        if not settings.splits and full.is_dir():
            by_name = splits_of_files(names)
        for name in sorted(names, key=os.fsencode):
            found.append(Container(os.path.join(folder, name), by_name.get(name, split)))
    first = dict[str, Container]()
    for box in found:
        other = first.setdefault(os.path.realpath(root / box.path), box)
        if other is not box:
            two = "two splits share files" if other.split != box.split else "one file has two names"
            what = f"{two}: {printable(other.path)!r} and {printable(box.path)!r}"
            raise UserError(what, where="source.path", allowed="separate files")
    return found


def splits_of_files(names: Set[str]) -> dict[str, str]:
    """File -> split, if every name has one keyword of a split as a word; else nothing.

    Raises UserError if only some have one, and where none is of `train`.
    """
    found = dict[str, str]()
    for name in names:
        words = re.split(r"[^a-z]+", name.lower())
        splits = {SPLIT_OF_NAME[word] for word in words if word in SPLIT_OF_NAME}
        if len(splits) == 1:
            found[name] = splits.pop()
    if len(set(found.values())) < 2 or 2 * len(found) < len(names):
        return {}
    if len(found) < len(names) or "train" not in found.values():
        raise ambiguous_splits(sorted(names))
    return found


def ambiguous_splits(names: Sequence[str]) -> UserError:
    """The error for folders or files of which some, or all, are named like splits."""
    shown = ", ".join(repr(printable(name)) for name in names[:NAMES_SHOWN])
    example = dict[str, str]()
    for name in names:
        split = "test" if re.search("test|hold", name, re.I) else "val"
        split = "train" if OF_TRAIN.search(name) else split
        if OF_TRAIN.search(name) or OF_OTHERS.search(name):
            example.setdefault(split, printable(name))
    places = ", ".join(f"{split}: {name!r}" for split, name in example.items())
    return UserError(
        f"these are named like splits, all or some: {shown}",
        where="source.path",
        next_step=f'if they are splits, say which are which: "source.splits={{{places}}}", which '
        "ignores all others; if they are not: 'source.splits={train: .}'",
    )


def read_cells(file: str, delimiter: str, *, where: str) -> list[tuple[int, list[str]]]:
    """Return (line, cells) of each row that is not empty. Raises UserError naming the line."""
    text = io.StringIO(read_text(file, where=where), newline="")
    # Tab-separated files have no quotes; cells with a quote inside are common there.
    quoting: Any = csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
    reader = csv.reader(text, delimiter=delimiter, quoting=quoting, strict=True)
    rows = []
    try:
        for row in reader:
            if row:
                rows.append((reader.line_num, row))
    except csv.Error as error:
        raise UserError(f"{file}:{reader.line_num}: {error}", where=where) from None
    return rows


def stem_and_suffix(name: str) -> tuple[str, str]:
    """`a.b.JPG` -> (`a.b`, `JPG`); without a dot the suffix is empty."""
    stem, dot, suffix = name.rpartition(".")
    return (stem, suffix) if dot else (name, "")


def is_image_name(name: str) -> bool:
    suffix = stem_and_suffix(name)[1]
    return suffix in IMAGE_SUFFIXES or suffix.lower() in IMAGE_SUFFIXES


def is_tar_name(name: str) -> bool:
    """Match names of tars; compressed ones are refused when they are opened."""
    return TAR_SUFFIX.search(name) is not None and not is_hidden(name)


def is_hidden(path: str) -> bool:
    """Return True if a part of a relative path starts with a dot, other than `.` and `..`."""
    return (path.startswith(".") or "/." in path) and any(
        part.startswith(".") and part not in (".", "..") for part in path.split("/")
    )


def name_reason(name: str, mode: int, *, hidden: bool) -> str | None:
    """Return the reason to reject a file by its type or name, or None."""
    if not stat.S_ISREG(mode):
        return "linked_folder" if stat.S_ISDIR(mode) else "not_a_file"
    if hidden:
        return "hidden"
    return None if is_image_name(name) else "other_name"


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Return True for a folder or a link to one."""
    try:
        return entry.is_dir()
    except OSError:  # a link in a circle, or into a closed folder
        return False
