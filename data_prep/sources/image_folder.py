"""A folder of images, one sub-folder per class.

Owns: which folders are classes.
Leaves out: the walk through them (`folder_walk`), what is inside the files
(`image_check`), what becomes of them (`input_ledger`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data_prep.sources.outages import printable
from data_prep.sources.paths import (
    SplitRoot,
    find_split_roots,
    is_image_name,
    link_reason,
    walk_folder,
)
from data_prep.sources.protocol import Container, Input, Spool, Watched
from vitscale.config.errors import UserError, UserErrors
from vitscale.runs.data_prep import LabelSettings, SourceSettings

SPLIT_LIKE_NAMES = frozenset({"train", "training", "val", "valid", "validation", "test"})


@dataclass(frozen=True, slots=True)
class ImageFolder:
    """Containers: every class folder of every split, and per split what lies beside them."""

    settings: SourceSettings
    labels: LabelSettings = LabelSettings()
    """Unused: the folder names the class."""

    @property
    def root(self) -> Path:
        return Path(self.settings.path).expanduser()

    def containers(self) -> list[Container]:
        """Class folders, ordered by split and the bytes of their path.

        Raises UserError(s) for missing or overlapping folders and for no classes.
        """
        found: list[Container] = []
        errors: list[UserError] = []
        for place in find_split_roots(self.settings, may_be_file=False):
            folders = _class_folders(self.root, place)
            if folders:
                found.append(Container(place.path or ".", place.split))
                found += folders
            else:
                errors.append(_no_class_error(self.root, place))
        if errors:
            raise UserErrors(errors)
        if not self.settings.splits:
            _refuse_split_folders(found, self.settings.path)
        return found

    def inputs(self, container: Container, *, spool: Spool) -> Iterator[Input | Watched]:
        """Every non-folder of a class folder, and every link to a folder that is not followed."""
        return walk_folder(self.root, container, is_container=_is_folder)


def _class_folders(root: Path, place: SplitRoot) -> list[Container]:
    """Sub-folders that are classes, hidden ones left out.

    Raises UserErrors for linked ones that are not followed: a whole class would be missing.
    """
    real_root, real_top = os.path.realpath(root), os.path.realpath(root / place.path)
    found: list[Container] = []
    errors: list[UserError] = []
    with os.scandir(root / place.path) as entries:
        for entry in entries:
            if entry.name.startswith(".") or not _is_folder(entry):
                continue
            if entry.is_symlink() and link_reason(
                entry.path, real_root=real_root, real_folders=[real_top]
            ):
                errors.append(_linked_class_error(entry.path, place))
            path = os.path.join(place.path, entry.name)
            found.append(Container(path, place.split, printable(entry.name)))
    if errors:
        raise UserErrors(errors)
    return sorted(found, key=lambda container: os.fsencode(container.path))


def _linked_class_error(path: str, place: SplitRoot) -> UserError:
    return UserError(
        f"class folder {printable(path)!r} is a link out of the source, or back into itself, "
        "and is not followed",
        where=place.where,
        next_step="remove the link, or put the images there",
    )


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir()


def _no_class_error(root: Path, place: SplitRoot) -> UserError:
    with os.scandir(root / place.path) as entries:
        loose = sum(1 for entry in entries if is_image_name(entry.name) and entry.is_file())
    return UserError(
        f"{str(root / place.path)!r} has no class folders ({loose} image files lie in it directly)",
        where=place.where,
        allowed="one sub-folder of images per class",
    )


def _refuse_split_folders(containers: list[Container], path: str) -> None:
    names = [container.class_name for container in containers if container.class_name is not None]
    if len(names) > 1 and {name.lower() for name in names} <= SPLIT_LIKE_NAMES:
        splits = ", ".join(f"{name}: {name}" for name in names)
        raise UserError(
            f"the sub-folders of {path!r} look like splits ({', '.join(names)}), not classes",
            where="source.path",
            next_step=f"set source.splits to {{{splits}}} in the configuration file",
        )
