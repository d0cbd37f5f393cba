"""A folder of images, one sub-folder per class.

Owns: the walk (links, hidden and foreign files), one class folder at a time.
Leaves out: what is inside the files (`image_check`), what becomes of them (`input_ledger`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from data_prep.inputs import Container, Input, Spool, Watched, changed_source, printable
from data_prep.sources.places import (
    Place,
    file_reason,
    find_places,
    is_image_name,
    link_reason,
    stat_entry,
    stem_and_suffix,
)
from vitscale.errors import UserError, UserErrors
from vitscale.runs.data_prep import SourceSettings

Entries = AbstractContextManager[Iterator[os.DirEntry[str]]]
SPLIT_LIKE_NAMES = frozenset({"train", "training", "val", "valid", "validation", "test"})


@dataclass(frozen=True, slots=True)
class ImageFolder:
    """Containers: every class folder of every split, and per split what lies beside them."""

    settings: SourceSettings

    @property
    def root(self) -> Path:
        return Path(self.settings.path).expanduser()

    def containers(self) -> list[Container]:
        """Class folders, ordered by split and the bytes of their path.

        Raises UserError(s) for missing or overlapping folders and for no classes.
        """
        found: list[Container] = []
        errors: list[UserError] = []
        for place in find_places(self.settings, may_be_file=False):
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
        return _walk(self.root, container)


def empty_class_error(root: Path, container: Container, *, where: str) -> UserError:
    """For a class folder that turned out to hold nothing named like an image."""
    folder = root / container.path
    hint = " (a link out of the source, or back into itself, is not followed)"
    return UserError(
        f"class folder {printable(str(folder))!r} holds no image files"
        f"{hint if folder.is_symlink() else ''}",
        where=where,
        next_step="remove the folder, or put its images there",
    )


def _class_folders(root: Path, place: Place) -> list[Container]:
    """Sub-folders that are classes: not hidden, and no links that are not followed."""
    real_root, real_top = os.path.realpath(root), os.path.realpath(root / place.path)
    found = []
    with os.scandir(root / place.path) as entries:
        for entry in entries:
            if _is_class_folder(entry, real_root=real_root, real_top=real_top):
                path = os.path.join(place.path, entry.name)
                found.append(Container(path, place.split, printable(entry.name)))
    return sorted(found, key=lambda container: os.fsencode(container.path))


def _is_class_folder(entry: os.DirEntry[str], *, real_root: str, real_top: str) -> bool:
    if entry.name.startswith(".") or not entry.is_dir():
        return False
    return not entry.is_symlink() or not link_reason(
        entry.path, real_root=real_root, real_folders=[real_top]
    )


def _no_class_error(root: Path, place: Place) -> UserError:
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


@dataclass(frozen=True, slots=True)
class _Folder:
    """A folder still to be walked."""

    path: str
    link_folders: tuple[str, ...]
    """Resolved folders that hold the links followed on the way here."""
    hidden: bool


def _walk(root: Path, container: Container) -> Iterator[Input | Watched]:
    """One class folder with all below it; without a class, what lies beside the class folders.

    Links are followed inside the source only, and never to a folder that holds one of the links
    on the way: that would not end.
    """
    real_root = os.path.realpath(root)
    top = "" if container.path == "." else container.path
    name_start = len(top) + 1 if top else 0
    holder = os.path.realpath(os.path.dirname(os.path.join(root, top)))
    is_link = container.class_name is not None and os.path.islink(os.path.join(root, top))
    stack = [_Folder(top, (holder,) if is_link else (), hidden=False)]
    split, class_name = container.split, container.class_name
    while stack:
        folder = stack.pop()
        full = os.path.join(root, folder.path)
        modified_ns, entries = _open_folder(full, folder.path)
        if entries is None:
            yield Input(folder.path, split, class_name, folder.path[name_start:], 0, "unreadable")
            continue
        yield Watched(folder.path or ".", 0, modified_ns)
        prefix = folder.path + "/" if folder.path else ""
        beside_classes = class_name is None and folder.path == top
        real_folders: tuple[str, ...] = ()
        with entries as listed:
            for entry in listed:
                path = prefix + entry.name
                hidden = folder.hidden or entry.name.startswith(".")
                reason = None
                link_folders = folder.link_folders
                if entry.is_symlink():
                    real_folders = real_folders or (os.path.realpath(full), *link_folders)
                    reason = link_reason(entry.path, real_root=real_root, real_folders=real_folders)
                    link_folders = real_folders
                if reason is None and entry.is_dir():
                    if hidden or not beside_classes:
                        stack.append(_Folder(path, link_folders, hidden))
                    continue
                num_bytes = modified_ns = 0
                if reason is None:
                    status = stat_entry(entry, path)
                    num_bytes, modified_ns = status.st_size, status.st_mtime_ns
                    reason = file_reason(entry.name, status.st_mode, hidden=hidden)
                    if reason is None and class_name is None:
                        reason = "no_class"
                name = prefix[name_start:] + stem_and_suffix(entry.name)[0]
                yield Input(
                    path, split, class_name, name, num_bytes, reason, modified_ns=modified_ns
                )


def _open_folder(full: str, path: str) -> tuple[int, Entries | None]:
    """Time of change, taken before reading, and the entries; none when they may not be read."""
    try:
        return os.stat(full).st_mtime_ns, os.scandir(full)
    except PermissionError:
        return 0, None
    except (FileNotFoundError, NotADirectoryError):
        raise changed_source(path) from None
