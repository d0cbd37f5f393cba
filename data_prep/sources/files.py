"""Find the folder or files of each split, and classify names.

Leaves out: which folders are classes, and the content of tars and tables (one module per kind).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from data_prep.sources.protocol import Container, printable, source_root
from vitscale.config.errors import UserError
from vitscale.data.folders import files_below, is_hidden, is_image_name
from vitscale.data.split_names import splits_of_files
from vitscale.data.webdataset import matching
from vitscale.runs.data_prep import SourceSettings

TAR_SUFFIX = re.compile(r"\.(tar(\.(gz|xz|zst|bz2|lz4))?|tgz|txz)$", re.IGNORECASE)


def key_of(split: str, settings: SourceSettings) -> str:
    """The setting that names the place of a split."""
    if settings.splits:
        return f"source.splits.{split}"
    return "source.path"


def split_places(settings: SourceSettings, *, kind: str) -> dict[str, str]:
    """Return the folder, file or pattern of each split, relative to the root; empty: the root.

    kind: what a place may be: `folder`, or `file or folder`, which may also be a pattern. Raises
    UserError for a missing source, paths outside and splits that share files.
    """
    top = Path(settings.path)
    may_be_file = kind != "folder"
    if not (top.is_dir() or (may_be_file and top.is_file())):
        problem = "is a file, not a folder" if top.exists() else f"no such {kind}"
        raise UserError(
            f"{settings.path!r}: {problem}",
            where="source.path",
            next_step="set source.path=IMAGES to your images; --help source.path lists the layouts",
        )
    if top.is_file():
        if settings.splits:
            raise UserError("needs a folder as source.path", where="source.splits")
        return {"train": top.name}
    if not settings.splits:
        return {"train": ""}

    places: dict[str, str] = {}
    for split, path in settings.splits.items():
        path = os.path.normpath(path)
        where = key_of(split, settings)
        full = top / path
        if os.path.isabs(path) or path.split("/")[0] == "..":
            raise UserError(f"{str(full)!r} is outside source.path", where=where)
        # A pattern is no file itself, but its folder must be there.
        is_pattern = not {"*", "?", "{"}.isdisjoint(full.name) and full.parent.is_dir()
        if not (full.is_dir() or (may_be_file and (full.is_file() or is_pattern))):
            raise UserError(f"{str(full)!r}: no such {kind}", where=where)
        for other, other_path in places.items():
            # One inside the other would store an image twice.
            real = full.resolve()
            other_real = (top / other_path).resolve()
            if real.is_relative_to(other_real) or other_real.is_relative_to(real):
                raise UserError(
                    f"two splits share files ({other} and {split})",
                    where="source.splits",
                    allowed="separate folders",
                )
        places[split] = "" if path == "." else path
    return places


def file_containers(
    settings: SourceSettings, is_wanted: Callable[[str], bool], *, kind: str
) -> list[Container]:
    """List the files of each split: one file, all wanted ones of a folder, or those of a pattern.

    kind: what such files are called in messages, plural. Raises UserError.
    """
    root = source_root(settings)
    containers = []
    for split, path in split_places(settings, kind="file or folder").items():
        full = root / path
        where = key_of(split, settings)
        is_folder = full.is_dir()
        folder = path if is_folder else os.path.dirname(path)
        with os.scandir(root / folder) as entries:
            shown = [entry for entry in entries if not is_hidden(entry.name)]

        names = {
            entry.name for entry in shown if is_wanted(entry.name) and entry.is_file()
        }

        # A folder stands for all its files, a pattern for those that it names.
        missing = set[str]()
        if is_folder:
            _refuse_deeper_files(full, is_wanted, kind=kind, where=where)
        else:
            wanted = matching(full.name, names, where=where)
            missing = wanted - names
            names &= wanted
        if not names:
            raise UserError(f"{printable(full)!r}: no {kind}", where=where)
        if missing:
            raise UserError(
                f"has no {min(missing)!r}, which the pattern names",
                where=where,
                next_step="get the missing files, or correct the pattern",
            )

        # The names of the files may tell splits apart.
        by_name = {}
        if is_folder and not settings.splits:
            by_name = splits_of_files(names, are_classes=settings.kind == "class_tars")
        # By bytes, since the locale must not change the order of containers.
        for name in sorted(names, key=os.fsencode):
            file = os.path.join(folder, name)
            containers.append(Container(file, by_name.get(name, split)))

    # A file with two names, by a link, would be stored twice.
    first = dict[str, Container]()
    for box in containers:
        other = first.setdefault(os.path.realpath(root / box.path), box)
        if other is not box:
            problem = "one file has two names"
            if other.split != box.split:
                problem = "two splits share files"
            raise UserError(
                f"{problem}: {printable(other.path)!r} and {printable(box.path)!r}",
                where="source.path",
                allowed="separate files",
            )
    return containers


def _refuse_deeper_files(
    folder: Path, is_wanted: Callable[[str], bool], *, kind: str, where: str
) -> None:
    """Raise UserError for wanted files in sub-folders, which may be splits or other corpora."""
    deeper = None
    # Links are followed, since a corpus may be put together from them.
    with suppress(OSError):  # a closed folder
        below = files_below(folder, follow_links=True)
        wanted = (path for path in below if is_wanted(os.path.basename(path)))
        deeper = next(
            (path for path in wanted if os.path.dirname(path) != str(folder)), None
        )

    if deeper is not None:
        example = printable(os.path.relpath(deeper, folder))
        raise UserError(
            f"{printable(folder)!r} has {kind} in sub-folders, such as {example!r}: are these "
            "splits, or more of the same?",
            where=where,
            allowed=f"{kind} in one folder for each split",
            next_step="name each split's folder, or a pattern such as '*' for the files of "
            "this folder alone, in source.splits; or move or link the files into one folder",
        )


def stem_and_suffix(name: str) -> tuple[str, str]:
    """`a.b.JPG` -> (`a.b`, `JPG`); without a dot the suffix is empty."""
    stem, dot, suffix = name.rpartition(".")
    if dot:
        return stem, suffix
    return name, ""


def member_path(name: str) -> str:
    """Remove `./`, `//`, and slashes at either end of a member's name."""
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def is_tar_name(name: str) -> bool:
    """Match names of tars; compressed ones are refused when they are opened."""
    return TAR_SUFFIX.search(name) is not None


def name_reason(name: str, mode: int, *, hidden: bool) -> str | None:
    """Return the reason to reject a file by its type or name, or None."""
    if not stat.S_ISREG(mode):
        if stat.S_ISDIR(mode):
            return "linked_folder"
        return "not_a_file"
    if hidden:
        return "hidden"
    if is_image_name(name):
        return None
    return "other_name"
