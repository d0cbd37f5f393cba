"""List a folder of images with one sub-folder per class, or without classes.

Owns: which folders are classes.
Leaves out: the walk through them (`paths`), the content of the files (`images.check`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from data_prep.sources.outages import printable
from data_prep.sources.paths import (
    SplitRoot,
    find_split_roots,
    is_hidden,
    is_image_name,
    link_reason,
    read_text,
    stem_and_suffix,
    walk_folder,
)
from data_prep.sources.protocol import NO_CLASS, Container, Input, Spool
from vitscale.config.errors import UserError, UserErrors
from vitscale.runs.data_prep import LabelSettings, SourceSettings

SPLIT_OF_NAME = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
}


@dataclass(frozen=True, slots=True)
class ImageFolder:
    """Containers: the class folders of every split, and per split the files beside them.

    Without classes: the folder of every split, with all files below it.
    """

    settings: SourceSettings
    labels: LabelSettings = LabelSettings()
    """Only whether classes are ignored: the folder names the class."""
    has_label_values: ClassVar[bool] = False

    @property
    def root(self) -> Path:
        return Path(self.settings.path).expanduser()

    def containers(self) -> list[Container]:
        """Class folders, ordered by split and the bytes of their path.

        Raises UserError(s) for missing or overlapping folders and for splits without classes.
        """
        found: list[Container] = []
        errors: list[UserError] = []
        has_classes = self.labels.values != "none"
        tops = find_split_roots(self.settings, may_be_file=False)
        if not self.settings.splits and (splits := _found_splits(self.root)):
            named = self.settings.model_copy(update={"splits": splits})
            tops = find_split_roots(named, may_be_file=False)
        for top in tops:
            folders = _class_folders(self.root, top) if has_classes else []
            if not has_classes:
                found.append(Container(top.path or ".", top.split, NO_CLASS))
            elif folders:
                found.append(Container(top.path or ".", top.split))
                found += folders
            elif self.settings.val_labels is not None:
                _listed_classes(self.settings.val_labels, self.root / top.path)
                found.append(Container(top.path or ".", top.split))
            else:
                errors.append(_no_class_error(self.root, top))
        if errors:
            raise UserErrors(errors)
        return found

    def inputs(self, container: Container, *, spool: Spool) -> Iterator[Input]:
        """Every file of a class folder, and every link that is not followed."""
        rows = walk_folder(self.root, container, is_container=_is_folder)
        listed, folder = self.settings.val_labels, self.root / container.path
        if container.class_name is not None or listed is None or _has_folders(folder):
            return rows
        classes = _listed_classes(listed, folder)
        return (_with_class(row, classes.get(row.name)) for row in rows)


def _class_folders(root: Path, top: SplitRoot) -> list[Container]:
    """Visible sub-folders, which are classes.

    Raises UserErrors for linked ones that are not followed: a class would be missing.
    """
    real_root, real_top = os.path.realpath(root), os.path.realpath(root / top.path)
    found: list[Container] = []
    errors: list[UserError] = []
    with os.scandir(root / top.path) as entries:
        for entry in entries:
            if entry.name.startswith(".") or not _is_folder(entry):
                continue
            if entry.is_symlink() and link_reason(
                entry.path, real_root=real_root, real_folders=[real_top]
            ):
                errors.append(_linked_class_error(entry.path, top))
            path = os.path.join(top.path, entry.name)
            found.append(Container(path, top.split, printable(entry.name)))
    if errors:
        raise UserErrors(errors)
    return sorted(found, key=lambda container: os.fsencode(container.path))


def _linked_class_error(path: str, top: SplitRoot) -> UserError:
    return UserError(
        f"class folder {printable(path)!r} is a link out of the source, or to a folder that "
        "contains it; such links are not followed",
        where=top.where,
        next_step="remove the link, or put the images there",
    )


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir()


def _has_folders(folder: Path) -> bool:
    with os.scandir(folder) as entries:
        return any(_is_folder(entry) and not entry.name.startswith(".") for entry in entries)


def _with_class(row: Input, class_name: str | None) -> Input:
    if row.reason == "no_class" and class_name is not None:
        row.class_name, row.reason = class_name, None
    return row


def _no_class_error(root: Path, top: SplitRoot) -> UserError:
    with os.scandir(root / top.path) as entries:
        loose = sum(1 for entry in entries if is_image_name(entry.name) and entry.is_file())
    return UserError(
        f"{str(root / top.path)!r} has no class folders, but {loose} image files",
        where=top.where,
        allowed="one sub-folder of images per class",
        next_step="set source.val_labels to a list of their classes, or leave the folder out by "
        "source.splits; for shards without labels: labels.values=none"
        if loose
        else None,
    )


def _found_splits(root: Path) -> dict[str, str]:
    """Split -> sub-folder if all sub-folders are named like splits; else nothing."""
    with os.scandir(root) as entries:
        folders = [e.name for e in entries if not e.name.startswith(".") and _is_folder(e)]
    names = sorted(map(printable, folders))
    if len(names) < 2 or not {name.lower() for name in names} <= SPLIT_OF_NAME.keys():
        return {}
    splits = {SPLIT_OF_NAME[name.lower()]: name for name in names}
    if len(splits) < len(names) or "train" not in splits:
        raise UserError(
            f"the sub-folders of {str(root)!r} are named like splits ({', '.join(names)})",
            where="source.path",
            next_step="say which are which, as in 'source.splits={train: FOLDER, val: FOLDER}'",
        )
    return splits


def _listed_classes(file: str, folder: Path) -> dict[str, str]:
    """Name without suffix -> class of the images of a folder, by the list `source.val_labels`."""
    text = read_text(Path(file).expanduser(), where="source.val_labels")
    rows = [re.split(r"[,\s]+", line.strip()) for line in text.splitlines() if line.strip()]
    with os.scandir(folder) as entries:
        names = [e.name for e in entries if is_image_name(e.name) and not is_hidden(e.name)]
    stems = [stem_and_suffix(name)[0] for name in sorted(names, key=os.fsencode)]
    if all(len(row) == 1 for row in rows):
        if len(rows) != len(stems):
            raise UserError(
                f"{file!r} has {len(rows):,} classes for {len(stems):,} images in {str(folder)!r}",
                where="source.val_labels",
                allowed="one class per image, in the order of their names; or lines of NAME,CLASS",
            )
        return {stem: row[0] for stem, row in zip(stems, rows, strict=True)}
    listed = {os.path.basename(row[0]): row[1] for row in rows if len(row) > 1}
    listed |= {
        stem_and_suffix(name)[0]: value for name, value in listed.items() if is_image_name(name)
    }
    if not listed.keys() & set(stems):
        raise UserError(
            f"{file!r} names no image of {str(folder)!r}",
            where="source.val_labels",
            allowed="lines of NAME,CLASS, such as ILSVRC2012_val_00000001,n01751748",
        )
    return listed
