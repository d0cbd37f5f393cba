"""List a folder of images with one sub-folder per class, or without classes."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

from data_prep.sources.files import (
    is_folder,
    is_image_name,
    key_of,
    name_reason,
    split_places,
    stem_and_suffix,
)
from data_prep.sources.protocol import (
    NO_CLASS,
    Container,
    Input,
    Source,
    printable,
    read_text,
    source_read_error,
)
from vitscale.config.errors import UserError

# No permission, or a path beyond the system's limit (PATH_MAX, 4,096 bytes on Linux).
CLOSED_ERRNOS = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)
SPLIT_OF_NAME = {
    **{"train": "train", "training": "train", "test": "test"},
    **{"val": "val", "valid": "val", "validation": "val"},
}


class ImageFolder(Source):
    """Containers: the class folders of every split, and per split the files beside them.

    Without classes: the folder of every split, with all files below it.
    """

    has_label_values = False

    def containers(self) -> list[Container]:
        found: list[Container] = []
        places = split_places(self.settings, kind="folder")
        if not self.settings.splits and (splits := _found_splits(self.root)):
            named = self.settings.model_copy(update={"splits": splits})
            places = split_places(named, kind="folder")
        for split, path in places.items():
            if self.labels.values == "none":
                found.append(Container(path or ".", split, NO_CLASS))
                continue
            folder = self.root / path
            names = _visible(folder, folders=True)
            if self.settings.val_labels is not None and not names:
                _listed_classes(self.settings.val_labels, folder)
            elif not names:
                num = len(_visible(folder))
                raise UserError(
                    f"{str(folder)!r} has no class folders, but {num} image files",
                    where=key_of(split, self.settings),
                    allowed="one sub-folder of images per class",
                    next_step="set source.val_labels to a list of their classes, or leave the "
                    "folder out by source.splits; for shards without labels: labels.values=none",
                )
            found.append(Container(path or ".", split))
            for name in names:
                found.append(Container(os.path.join(path, name), split, printable(name)))
        return found

    def inputs(self, container: Container) -> Iterator[Input]:
        listed, classes = self.settings.val_labels, dict[str, str]()
        folder = self.root / container.path
        if listed is not None and container.class_name is None:
            classes = {} if _visible(folder, folders=True) else _listed_classes(listed, folder)
        top = "" if container.path == "." else container.path
        for row in self._files(container, top, start=len(top) + 1 if top else 0, hidden=False):
            if row.reason == "no_class" and row.name in classes:
                row.class_name, row.reason = classes[row.name], None
            yield row

    def _files(
        self, container: Container, folder: str, *, start: int, hidden: bool
    ) -> Iterator[Input]:
        """Yield all files below a class folder; without a class, those beside the class folders.

        Links to files are followed, and the container itself may be a link; a link to a folder
        below it is one row, so that no walk can go in circles. start: of names in paths.
        """
        split, class_name = container.split, container.class_name
        try:
            with os.scandir(self.root / folder) as listed:
                entries = list(listed)
        except OSError as error:
            yield Input(folder, split, class_name, folder[start:], 0, _fault(error, folder))
            return
        for entry in entries:
            path = f"{folder}/{entry.name}" if folder else entry.name
            is_hidden = hidden or entry.name.startswith(".")
            if entry.is_dir(follow_symlinks=False):
                if class_name is not None or is_hidden:
                    yield from self._files(container, path, start=start, hidden=is_hidden)
                continue
            if class_name is None and not is_hidden and is_folder(entry):
                continue  # a linked class folder
            name = path[start : len(path) - len(entry.name)] + stem_and_suffix(entry.name)[0]
            item = Input(path, split, class_name, name, 0)
            try:
                status = entry.stat()
            except OSError as error:
                item.reason = _fault(error, path, is_link=entry.is_symlink())
            else:
                item.num_bytes, item.modified_ns = status.st_size, status.st_mtime_ns
                item.reason = name_reason(entry.name, status.st_mode, hidden=is_hidden)
            if item.reason is None and class_name is None:
                item.reason = "no_class"
            yield item


def _fault(error: OSError, path: str, *, is_link: bool = False) -> str:
    """Return the reason of a file or folder that cannot be read; raise for all others."""
    if error.errno in CLOSED_ERRNOS:
        return "unreadable"
    if is_link and error.errno in (errno.ENOENT, errno.ELOOP):
        return "link_broken"
    raise source_read_error(error, path) from None


def _visible(folder: Path, *, folders: bool = False) -> list[str]:
    """Names of the visible sub-folders, or image files, sorted by their bytes."""
    with os.scandir(folder) as entries:
        shown = [each for each in entries if each.name[0] != "."]
    names = [e.name for e in shown if (is_folder(e) if folders else is_image_name(e.name))]
    return sorted(names, key=os.fsencode)


def _found_splits(root: Path) -> dict[str, str]:
    """Split -> sub-folder if all sub-folders are named like splits; else nothing."""
    names = [printable(name) for name in _visible(root, folders=True)]
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
    text = read_text(file, where="source.val_labels")
    rows = [re.split(r"[,\s]+", line.strip()) for line in text.splitlines() if line.strip()]
    stems = [stem_and_suffix(name)[0] for name in _visible(folder)]
    if len(rows) == len(stems) and all(len(row) == 1 for row in rows):
        return {stem: row[0] for stem, row in zip(stems, rows, strict=True)}
    listed = {os.path.basename(row[0]): row[1] for row in rows if len(row) > 1}
    listed = {stem_and_suffix(n)[0] if is_image_name(n) else n: c for n, c in listed.items()}
    if not listed.keys() & set(stems):
        raise UserError(
            f"{file!r} with {len(rows):,} lines names no image of the {len(stems):,} in "
            f"{str(folder)!r}",
            where="source.val_labels",
            allowed="lines of NAME,CLASS, such as ILSVRC2012_val_00000001,n01751748; or one class "
            "per image, in the order of their names",
        )
    return listed
