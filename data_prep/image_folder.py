"""A folder of images, one sub-folder per class: which files it holds.

Owns: the walk (its order, links, hidden and foreign files) and class names.
Leaves out: what is inside the files (`image_check`), what becomes of them (`input_ledger`).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vitscale.errors import UserError, UserErrors
from vitscale.runs.data_prep import SourceSettings

# Named like an image, hence opened and judged by content. Formats that are not taken stand here
# too, so that a folder of .bmp files is reported and not passed over as foreign files.
IMAGE_SUFFIXES = frozenset(
    ".jpg .jpeg .jpe .jfif .png .webp .bmp .gif .tif .tiff .heic .heif .avif .jp2 .ppm".split()
)
SPLIT_LIKE_NAMES = frozenset({"train", "training", "val", "valid", "validation", "test"})


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file of the source. `reason` is set when its name or type alone rejects it."""

    path: str
    """Relative to source.path, as the operating system gives it."""
    split: str
    class_name: str | None
    num_bytes: int
    reason: str | None

    @property
    def printable_path(self) -> str:
        return printable(self.path)


def printable(name: str) -> str:
    """A file name as valid UTF-8; bytes that are not become \\xNN."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def scan_image_folder(source: SourceSettings) -> list[InputFile]:
    """Every file below the split folders, ordered by the bytes of its path.

    Raises UserError(s) for a missing folder, no classes, empty classes, linked-away classes.
    """
    root = Path(source.path).expanduser()
    if not root.is_dir():
        what = "is not a folder" if root.exists() else "no such folder"
        raise UserError(f"{source.path!r}: {what}", where="source.path")
    files: list[InputFile] = []
    errors: list[UserError] = []
    for split, folder in (source.splits or {"train": "."}).items():
        found, problems = _scan_split(root, split=split, folder=folder)
        files += found
        errors += problems
    if errors:
        raise UserErrors(errors)
    if not source.splits:
        _refuse_split_folders(files, source.path)
    # Overlapping split folders would store one image twice.
    paths = [file.path for file in files]
    if len(set(paths)) != len(paths):
        raise UserError("two splits share files", where="source.splits", allowed="separate folders")
    return sorted(files, key=lambda file: os.fsencode(file.path))


def class_names(files: Sequence[InputFile]) -> tuple[str, ...]:
    """Class folders of all splits, sorted; the position is the label."""
    return tuple(sorted({file.class_name for file in files if file.class_name is not None}))


def _scan_split(root: Path, *, split: str, folder: str) -> tuple[list[InputFile], list[UserError]]:
    where = f"source.splits.{split}" if folder != "." else "source.path"
    top = root / folder
    if not top.is_dir():
        return [], [UserError(f"{str(top)!r}: no such folder", where=where)]
    if not top.resolve().is_relative_to(root.resolve()):
        return [], [UserError(f"{str(top)!r} lies outside source.path", where=where)]
    files = list(_walk(root, split=split, top=os.path.normpath(folder)))
    images: dict[str, int] = {}
    class_folders = []
    for entry in sorted(os.scandir(top), key=lambda entry: os.fsencode(entry.name)):
        if not entry.name.startswith(".") and entry.is_dir():
            class_folders.append(entry.name)
            images[printable(entry.name)] = 0
    for file in files:
        if file.class_name is not None and file.reason is None:
            images[file.class_name] += 1
    loose = sum(1 for file in files if file.reason == "no_class")
    if not class_folders:
        what = f"{str(top)!r} has no class folders ({loose} image files lie in it directly)"
        return files, [UserError(what, where=where, allowed="one sub-folder of images per class")]
    empty = [name for name, num in images.items() if num == 0]
    return files, [_empty_class_error(top, name, where) for name in empty]


def _empty_class_error(top: Path, name: str, where: str) -> UserError:
    linked = (top / name).is_symlink()
    hint = " (a link out of the source, or back into itself, is not followed)" if linked else ""
    return UserError(
        f"class folder {str(top / name)!r} holds no image files{hint}",
        where=where,
        next_step="remove the folder, or put its images there",
    )


def _refuse_split_folders(files: Sequence[InputFile], path: str) -> None:
    names = class_names(files)
    if len(names) > 1 and {name.lower() for name in names} <= SPLIT_LIKE_NAMES:
        splits = ", ".join(f"{name}: {name}" for name in names)
        raise UserError(
            f"the sub-folders of {path!r} look like splits ({', '.join(names)}), not classes",
            where="source.path",
            next_step=f"set source.splits to {{{splits}}} in the configuration file",
        )


def _walk(root: Path, *, split: str, top: str) -> Iterator[InputFile]:
    """Every non-folder below root/top, and every link to a folder that is not followed.

    Links are followed inside the source only. A linked folder that holds the folder the link lies
    in would never end. The stack holds (relative folder, class or None at the top, hidden).
    """
    real_root = os.path.realpath(root)
    stack: list[tuple[str, str | None, bool]] = [("" if top == "." else top, None, False)]
    at_top = True
    while stack:
        folder, class_name, hidden_above = stack.pop()
        real_folder = os.path.realpath(os.path.join(root, folder))
        for entry in os.scandir(os.path.join(root, folder)):
            path = os.path.join(folder, entry.name)
            hidden = hidden_above or entry.name.startswith(".")
            reason = _link_reason(entry, real_root, real_folder) if entry.is_symlink() else None
            if reason is None and entry.is_dir():
                own_class = printable(entry.name) if at_top and not hidden else class_name
                stack.append((path, own_class, hidden))
                continue
            num_bytes = 0
            if reason is None:
                status = entry.stat()
                num_bytes = status.st_size
                reason = _name_reason(entry.name, status.st_mode, hidden, class_name)
            yield InputFile(path, split, class_name, num_bytes, reason)
        at_top = False


def _link_reason(entry: os.DirEntry[str], real_root: str, real_folder: str) -> str | None:
    target = os.path.realpath(entry.path)
    if not os.path.exists(entry.path):
        return "link_broken"  # also links that form a ring
    if os.path.commonpath([target, real_root]) != real_root:
        return "link_outside"
    if os.path.isdir(target) and os.path.commonpath([target, real_folder]) == target:
        return "link_loop"
    return None


def _name_reason(name: str, mode: int, hidden: bool, class_name: str | None) -> str | None:
    if not stat.S_ISREG(mode):
        return "not_a_file"
    if hidden:
        return "hidden"
    if os.path.splitext(name)[1].lower() not in IMAGE_SUFFIXES:
        return "other_name"
    return "no_class" if class_name is None else None
