"""Every file below a folder, as inputs, with what must not change meanwhile.

Owns: the walk: links, hidden and foreign files, folders that may not be read.
Leaves out: which folders are walked (`image_folder`, `class_tars`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from data_prep.sources.places import file_reason, link_reason, stat_entry, stem_and_suffix
from data_prep.sources.protocol import Container, Input, Watched, changed_source

Entries = AbstractContextManager[Iterator[os.DirEntry[str]]]
IsListedApart = Callable[[os.DirEntry[str]], bool]


@dataclass(frozen=True, slots=True)
class _Folder:
    """A folder still to be walked."""

    path: str
    link_folders: tuple[str, ...]
    """Resolved folders that hold the links followed on the way here."""
    hidden: bool


def walk_folder(
    root: Path, container: Container, *, is_listed_apart: IsListedApart
) -> Iterator[Input | Watched]:
    """One class folder with all below it; without a class, what lies beside the other containers.

    is_listed_apart: whether a visible entry of a folder without class is such a container.

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
        beside_others = class_name is None and folder.path == top
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
                if beside_others and reason is None and not hidden and is_listed_apart(entry):
                    continue
                if reason is None and entry.is_dir():
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
