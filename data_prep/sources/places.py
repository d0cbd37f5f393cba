"""Where a source and its splits lie, and what a name or a link alone says about an input.

Owns: the folder that paths are relative to, split folders and files below it, which names are
images, hidden names, links.
Leaves out: what a folder, tar or table holds (one module per kind).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data_prep.sources.protocol import changed_source
from vitscale.config.errors import UserError, UserErrors
from vitscale.runs.data_prep import SourceSettings

# Named like an image, hence opened and judged by content. Formats that are not taken stand here
# too, so that a folder of .bmp files is reported and not passed over as foreign files.
IMAGE_SUFFIXES = frozenset(
    "jpg jpeg jpe jfif png webp bmp gif tif tiff heic heif avif jp2 ppm".split()
)


@dataclass(frozen=True, slots=True)
class Place:
    """A split's folder or file."""

    split: str
    path: str
    """Relative to the source's root; empty: the root itself."""
    where: str
    """Configuration key that named it."""


def source_root(settings: SourceSettings) -> Path:
    """What every path of a source is relative to: source.path, or the folder of that file."""
    path = Path(settings.path).expanduser()
    return path.parent if path.is_file() else path


def find_places(settings: SourceSettings, *, may_be_file: bool) -> list[Place]:
    """The splits' places. Raises UserError(s) for those missing, outside or inside each other."""
    top = Path(settings.path).expanduser()
    kinds = "file or folder" if may_be_file else "folder"
    if not top.exists():
        raise UserError(f"{settings.path!r}: no such {kinds}", where="source.path")
    if not (top.is_dir() or (may_be_file and top.is_file())):
        raise UserError(f"{settings.path!r}: is not a {kinds}", where="source.path")
    if top.is_file():
        if settings.splits:
            raise UserError("needs a folder as source.path", where="source.splits")
        return [Place("train", top.name, "source.path")]
    places, errors = [], []
    for split, path in (settings.splits or {"train": "."}).items():
        where = f"source.splits.{split}" if settings.splits else "source.path"
        problem = _place_problem(top, path, may_be_file=may_be_file)
        if problem:
            errors.append(UserError(problem, where=where))
        places.append(Place(split, "" if os.path.normpath(path) == "." else path, where))
    errors = errors or _overlaps(top, places)
    if errors:
        raise UserErrors(errors)
    return [Place(place.split, _normal(place.path), place.where) for place in places]


def _normal(path: str) -> str:
    return os.path.normpath(path) if path else ""


def _place_problem(top: Path, path: str, *, may_be_file: bool) -> str | None:
    place = top / path
    if not (place.is_dir() or (may_be_file and place.is_file())):
        return f"{str(place)!r}: no such {'file or folder' if may_be_file else 'folder'}"
    if not place.resolve().is_relative_to(top.resolve()):
        return f"{str(place)!r} lies outside source.path"
    return None


def _overlaps(top: Path, places: Sequence[Place]) -> list[UserError]:
    """Places inside each other would store one image twice."""
    for i, one in enumerate(places):
        for other in places[:i]:
            a, b = (top / one.path).resolve(), (top / other.path).resolve()
            if a.is_relative_to(b) or b.is_relative_to(a):
                what = f"two splits share files ({other.split} and {one.split})"
                return [UserError(what, where="source.splits", allowed="separate folders")]
    return []


def stem_and_suffix(name: str) -> tuple[str, str]:
    """`a.b.JPG` -> (`a.b`, `JPG`); without a dot the suffix is empty."""
    stem, dot, suffix = name.rpartition(".")
    return (stem, suffix) if dot else (name, "")


def is_image_name(name: str) -> bool:
    """Whether the suffix says image."""
    suffix = stem_and_suffix(name)[1]
    return suffix in IMAGE_SUFFIXES or suffix.lower() in IMAGE_SUFFIXES


def is_hidden(path: str) -> bool:
    """Whether a part of a relative path starts with a dot (`.` and `..` are not names)."""
    return (path.startswith(".") or "/." in path) and any(
        part.startswith(".") and part not in (".", "..") for part in path.split("/")
    )


def link_reason(path: str, *, real_root: str, real_folders: Sequence[str]) -> str | None:
    """Why a link is not followed: to nothing, out of the source, or to where it comes from.

    real_folders: the folder that holds the link, and those that hold links followed to get there.
    """
    target = os.path.realpath(path)
    if not os.path.exists(path):
        return "link_broken"  # also links that form a ring
    if not lies_in(target, real_root):
        return "link_outside"
    if os.path.isdir(target) and any(lies_in(folder, target) for folder in real_folders):
        return "link_loop"
    return None


def lies_in(path: str, folder: str) -> bool:
    """Whether one resolved path is another or lies below it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def stat_entry(entry: os.DirEntry[str], path: str) -> os.stat_result:
    """`stat` behind the link; a file that is gone since its folder was read is an error."""
    try:
        return entry.stat()
    except FileNotFoundError:
        raise changed_source(path) from None


def file_reason(name: str, mode: int, *, hidden: bool) -> str | None:
    """What type and name of a file alone say against it."""
    if stat.S_IFMT(mode) != stat.S_IFREG:
        return "not_a_file"
    if hidden:
        return "hidden"
    return None if is_image_name(name) else "other_name"
