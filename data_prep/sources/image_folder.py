"""List a folder of images with one sub-folder per class, or without classes."""

from __future__ import annotations

import errno
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from data_prep.sources.files import (
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
    source_read_error,
)
from vitscale.config.errors import UserError
from vitscale.config.text_files import read_cells
from vitscale.data.folders import folders_in, is_folder, is_hidden, is_image_name
from vitscale.data.split_names import SPLIT_OF_NAME, splits_of_folders

# No permission, or a path beyond the system's limit (PATH_MAX, 4,096 bytes on Linux).
CLOSED_ERRNOS = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)
# Without classes a split is divided into about this many units of listing, if it has the folders.
UNLABELLED_FOLDERS = 64
VAL_LABELS = "source.val_labels"
# Name and class; or a class that is no number, and numbers alone, such as tiny-imagenet's boxes.
CLASS_IS_SECOND = re.compile(r".*\n(.*|.*[^-+.\d\n].*(\n[-+.\d]*)*)\Z")
# Separators of name and class in such a list. A blank is one only where the name ends.
SEPARATORS = "\t;,|: "


class ImageFolder(Source):
    """Containers: the class folders of every split, and per split the files beside them.

    Without classes: the upper folders of every split, and for each that has one of them inside, the
    files beside it.
    """

    has_label_values = False

    def containers(self) -> list[Container]:
        # Where the settings name no splits, the names of the folders may.
        settings = self.settings
        places = split_places(settings, kind="folder")
        if not settings.splits:
            splits = splits_of_folders(self.root)
            if splits:
                named = settings.model_copy(update={"splits": splits})
                places = split_places(named, kind="folder")

        containers: list[Container] = []
        used_lines = set[int]()
        for split, path in places.items():
            if self.labels.values == "none":
                containers += self._unlabelled(path, split)
                continue

            # Only a list can say the classes of images that lie in one folder.
            folder = self.root / path
            names = folders_in(folder)
            if settings.val_labels is not None and not names:
                _, others = self._listed_classes(folder, used_lines)
                if others:
                    print(
                        f"note: {len(others):,} lines of {VAL_LABELS} name no image of "
                        f"{str(folder)!r}, such as {others[-1]!r}"
                    )
            elif not names:
                num = len(_images_in(folder))
                raise UserError(
                    f"{str(folder)!r} has no class folders, and {num} image files of its own",
                    where=key_of(split, settings),
                    next_step="make one folder of images per class there; or set "
                    "source.val_labels to a list of their classes, leave the folder out by "
                    "source.splits, or make shards without labels: labels.values=none",
                )
            # Files beside the class folders are listed, too: the ledger names every file.
            containers.append(Container(path or ".", split))
            for name in names:
                class_path = os.path.join(path, name)
                containers.append(Container(class_path, split, printable(name)))
        return containers

    def _unlabelled(self, top: str, split: str) -> list[Container]:
        """Divide a split among the processes that list it, from its folder downwards."""
        base = top or "."
        containers: list[Container] = []
        folders = [top]

        # Folders are opened level by level until there are enough units to share.
        while folders and len(folders) < UNLABELLED_FOLDERS:
            # These are too few to share: their files are one unit, each folder inside another.
            containers += [
                Container(folder or ".", split, NO_CLASS, base=base, only_files=True)
                for folder in folders
            ]
            folders = [
                os.path.join(folder, name)
                for folder in folders
                for name in self._inside(folder)
            ]
        return containers + [
            Container(folder, split, NO_CLASS, base=base) for folder in folders
        ]

    def _inside(self, folder: str) -> list[str]:
        """Names of the visible sub-folders that are no links; none of a closed folder."""
        full = self.root / folder
        with suppress(OSError):  # the listing of this folder says which
            return [name for name in folders_in(full) if not (full / name).is_symlink()]
        return []

    def inputs(self, container: Container) -> Iterator[Input]:
        """Yield all files below a class folder; without a class, those beside the class folders.

        Links to files are followed, and the container itself may be a link; a link to a folder
        below it is one row, so that no walk can go in circles.
        """
        class_name = container.class_name
        listed_classes: dict[str, str] = {}
        if self.settings.val_labels is not None and class_name is None:
            top = self.root / container.path
            if not folders_in(top):
                listed_classes, _ = self._listed_classes(top, set())

        # Where the name of an input begins in its path.
        base = container.base or container.path
        start = 0 if base == "." else len(base) + 1

        # A list instead of recursion: folders may be nested deeper than calls.
        only_files = container.only_files or class_name is None
        folders = [("" if container.path == "." else container.path, False)]
        while folders:
            folder, below_hidden = folders.pop()
            try:
                with os.scandir(self.root / folder) as listing:
                    entries = list(listing)
            except OSError as error:
                reason = _fault(error, folder)
                name = folder[start:]
                yield Input(folder, container.split, class_name, name, 0, reason)
                continue

            splits = set[str | None]()
            for entry in entries:
                # Joined by hand: `os.path.join` takes longer, and a corpus has millions of files.
                path = f"{folder}/{entry.name}" if folder else entry.name
                hidden = below_hidden or is_hidden(entry.name)
                if entry.is_dir(follow_symlinks=False):
                    splits.add(SPLIT_OF_NAME.get(entry.name.lower()))
                    if hidden or not only_files:
                        folders.append((path, hidden))
                    continue
                if class_name is None and not hidden and is_folder(entry):
                    continue  # a linked class folder
                item = _input_of(entry, path, container, start=start, hidden=hidden)
                if item.reason == "no_class" and entry.name in listed_classes:
                    item.class_name = listed_classes[entry.name]
                    item.reason = None
                yield item

            # Splits inside a class may be a corpus of their own, unlike the folders of splits or
            # classes themselves.
            is_inside = class_name is not None and (folder or ".") != container.base
            are_splits = "train" in splits and splits & {"val", "test"}
            if is_inside and are_splits and not (below_hidden or self.settings.splits):
                raise UserError(
                    f"{printable(folder)!r} has sub-folders that are named like splits",
                    where="source.path",
                    next_step="if they are splits, link to the images in folders SPLIT/CLASS, or "
                    "list them in a path_table; if they are not: 'source.splits={train: .}'",
                )

    def _listed_classes(
        self, folder: Path, used_lines: set[int]
    ) -> tuple[dict[str, str], list[str]]:
        """Read the list `source.val_labels` of the images of a folder.

        used_lines: for the images of other splits; those used here are added.
        Returns (file name -> class, what the list names that is no image of the folder). Raises
        UserError for a list that can be read in several ways, or names no image.
        """
        file = self.settings.val_labels or ""
        names = _images_in(folder)

        # A list may name an image with its suffix or without, alone or through this folder. Beside
        # a.jpg.png, a.jpg is the other image.
        image_of = {stem_and_suffix(name)[0]: name for name in names}
        # Full names come last, so that they win over stems.
        image_of.update(zip(names, names, strict=True))

        # Only the part below this folder counts, whatever the paths of the list begin with.
        def image_at(path: str) -> str | None:
            inside = f"/{path}".rpartition(f"/{folder.name}/")[2]
            return image_of.get(inside.lstrip("/"))

        # The separator is the one by which most lines begin with the name of an image.
        def num_known(separator: str) -> int:
            rows = read_cells(file, separator, where=VAL_LABELS)
            return sum(len(row) > 1 and image_at(row[0]) is not None for _, row in rows)

        separator = max(SEPARATORS, key=num_known)
        rows = read_cells(file, separator, where=VAL_LABELS)
        if not num_known(separator):
            rows = _rows_in_order(file, names, folder=folder)
        elif separator == " ":
            # Without the name, the rest of a line is the class, blanks included.
            rows = [(number, [row[0], " ".join(row[1:])]) for number, row in rows]

        # The first line may have titles. Kaggle's list of ILSVRC's val is known by one of them: it
        # gives a class with the boxes of its objects.
        header = rows[0][1]
        titles = {title: number for number, title in enumerate(header)}
        has_title = self.settings.label in titles
        column = titles.get(self.settings.label, 1)
        has_boxes = "PredictionString" in titles

        # The most frequent number of values is the right one; others are faults.
        width = Counter(len(row) for _, row in rows).most_common(1)[0][0]
        classes: dict[str, str] = {}
        lines: dict[str, int] = {}
        others = []
        for number, row in rows:
            problem = ""
            name = image_at(row[0])
            if len(row) != width:
                problem = (
                    f"{len(row)} values instead of {width}; "
                    f"quote a class that has a {separator!r}"
                )
            elif name is None:
                others.append(row[0])
            elif number in used_lines:
                problem = "fits an image of another split, too; write names with folders: val/NAME"
            elif not has_title and not CLASS_IS_SECOND.match("\n".join(row)):
                problem = "which of these is the class? Line 1 has no title equal to source.label"
            else:
                class_name = row[column]
                if has_boxes:
                    class_name = class_name.split(" ")[0]
                # A list may name an image several times if it always gives the same class.
                if classes.setdefault(name, class_name) != class_name:
                    problem = f"{name!r} has another class than in line {lines[name]}"
                lines.setdefault(name, number)
            if problem:
                raise UserError(f"{file}:{number}: {problem}", where=VAL_LABELS)

        # Titles are no image that is missing.
        used_lines.update(lines.values())
        if header[0] in others and not is_image_name(header[0]):
            others.remove(header[0])
        return classes, others


def _input_of(
    entry: os.DirEntry[str],
    path: str,
    container: Container,
    *,
    start: int,
    hidden: bool,
) -> Input:
    """The input of a file. start: of its name in its path."""
    name = path[start : len(path) - len(entry.name)] + stem_and_suffix(entry.name)[0]
    item = Input(path, container.split, container.class_name, name, 0)

    # The size of a broken link is unknown, and stays 0.
    try:
        status = entry.stat()
    except OSError as error:
        item.reason = _fault(error, path, is_link=entry.is_symlink())
        return item
    item.set_status(status)
    item.reason = name_reason(entry.name, status.st_mode, hidden=hidden)
    if item.reason is None and container.class_name is None:
        item.reason = "no_class"
    return item


def _fault(error: OSError, path: str, *, is_link: bool = False) -> str:
    """Return the reason of a file or folder that cannot be read; raise for all others."""
    if error.errno in CLOSED_ERRNOS:
        return "unreadable"
    if is_link and error.errno in (errno.ENOENT, errno.ELOOP):
        return "link_broken"
    raise source_read_error(error, path) from None


def _images_in(folder: Path) -> list[str]:
    """Names of the visible image files, sorted by their bytes."""
    names = [
        name for name in os.listdir(folder) if name[0] != "." and is_image_name(name)
    ]
    return sorted(names, key=os.fsencode)


def _rows_in_order(
    file: str, names: Sequence[str], *, folder: Path
) -> list[tuple[int, list[str]]]:
    """Rows of name and class, from lines of classes alone. names: of images, sorted by bytes."""
    classes = read_cells(file, "\n", where=VAL_LABELS)
    allowed = "lines of NAME,CLASS, such as ILSVRC2012_val_00000001,n01751748"
    if len(classes) != len(names) or not names:
        raise UserError(
            f"{file!r} with {len(classes):,} lines names no image of the {len(names):,} in "
            f"{str(folder)!r}",
            where=VAL_LABELS,
            allowed=f"{allowed}; or one class per image, in the order of their names",
        )

    # Lines in the order of names are trusted only if all ways of sorting agree.
    for first, by_number in zip(names, sorted(names, key=_natural), strict=True):
        if first != by_number:
            raise UserError(
                f"{file!r} has classes alone, but the images have no certain order: sorted as text "
                f"{first!r} is before {by_number!r}, sorted by number it is after it",
                where=VAL_LABELS,
                allowed=allowed,
            )

    return [
        (line, [name, *row]) for name, (line, row) in zip(names, classes, strict=True)
    ]


def _natural(name: str) -> list[str | int]:
    """The name without case and with its numbers as numbers, as file managers sort."""
    # Text and numbers alternate, so that only like parts are compared.
    parts: list[str | int] = list(re.split(r"([0-9]+)", name.lower()))
    parts[1::2] = map(int, parts[1::2])
    return parts
