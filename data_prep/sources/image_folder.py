"""List a folder of images with one sub-folder per class, or without classes.

Owns: which folders are classes.
Leaves out: the walk through them (`paths`), the content of the files (`images.check`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from data_prep.sources.outages import printable
from data_prep.sources.paths import (
    SplitRoot,
    find_split_roots,
    is_image_name,
    link_reason,
    walk_folder,
)
from data_prep.sources.protocol import NO_CLASS, Container, Input, Spool
from vitscale.config.errors import UserError, UserErrors
from vitscale.runs.data_prep import LabelSettings, SourceSettings

SPLIT_LIKE_NAMES = frozenset({"train", "training", "val", "valid", "validation", "test"})


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
        for top in find_split_roots(self.settings, may_be_file=False):
            folders = _class_folders(self.root, top) if has_classes else []
            if not has_classes:
                found.append(Container(top.path or ".", top.split, NO_CLASS))
            elif folders:
                found.append(Container(top.path or ".", top.split))
                found += folders
            else:
                errors.append(_no_class_error(self.root, top))
        if errors:
            raise UserErrors(errors)
        if not self.settings.splits:
            _refuse_split_folders(self.root, self.settings.path)
        return found

    def inputs(self, container: Container, *, spool: Spool) -> Iterator[Input]:
        """Every file of a class folder, and every link that is not followed."""
        return walk_folder(self.root, container, is_container=_is_folder)


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


def _no_class_error(root: Path, top: SplitRoot) -> UserError:
    with os.scandir(root / top.path) as entries:
        loose = sum(1 for entry in entries if is_image_name(entry.name) and entry.is_file())
    return UserError(
        f"{str(root / top.path)!r} has no class folders, but {loose} image files",
        where=top.where,
        allowed="one sub-folder of images per class",
        next_step="for shards without labels: set labels.values=none" if loose else None,
    )


def _refuse_split_folders(root: Path, path: str) -> None:
    with os.scandir(root) as entries:
        folders = [e.name for e in entries if not e.name.startswith(".") and _is_folder(e)]
    names = [printable(name) for name in sorted(folders, key=os.fsencode)]
    if len(names) > 1 and {name.lower() for name in names} <= SPLIT_LIKE_NAMES:
        splits = ", ".join(f"{name}: {name}" for name in names)
        raise UserError(
            f"the sub-folders of {path!r} are named like splits ({', '.join(names)}), not classes",
            where="source.path",
            next_step=f"set source.splits to {{{splits}}} in the configuration file",
        )
