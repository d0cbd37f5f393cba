"""Look into folders of images, however deep they are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

# Thumbnails, deleted files and the like, which file servers and other systems leave beside images.
SYSTEM_FOLDERS = frozenset(
    "@eadir|@recycle|#recycle|#snapshot|$recycle.bin|system volume information|lost+found|"
    "__macosx".split("|")
)

# Files with these names are meant as images, also of formats that are not read: a folder of .jp2
# is reported as such, and not left out as other files.
IMAGE_SUFFIXES = tuple(
    ".jpg .jpeg .jpe .jfif .mpo .png .apng .webp .bmp .gif .tif .tiff .heic .heif .hif .avif .jp2 "
    ".ppm".split()
)


def is_image_name(name: str) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES)


def is_hidden(name: str) -> bool:
    """Whether a file or folder of this name is of the system, or begins with a dot."""
    return name.startswith(".") or name.lower() in SYSTEM_FOLDERS


def files_below(root: Path | str, *, follow_links: bool = False) -> Iterator[str]:
    """Yield the paths of the visible files below a folder, and below visible folders alone.

    follow_links: to folders, too; one that was seen by another path is not seen again.
    Raises OSError. A list instead of recursion: folders may be nested deeper than calls.
    """
    folders = [os.fspath(root)]
    seen = set[str]()
    while folders:
        folder = folders.pop()
        if follow_links:
            real = os.path.realpath(folder)
            # A link may lead back to a folder above it, which would never end.
            if real in seen:
                continue
            seen.add(real)

        # The whole listing is read first, so that no folder stays open while its files are used.
        with os.scandir(folder) as entries:
            shown = [entry for entry in entries if not is_hidden(entry.name)]
        for entry in shown:
            if not is_folder(entry):
                yield entry.path
            elif follow_links or not entry.is_symlink():
                folders.append(entry.path)


def folders_in(root: Path) -> list[str]:
    """Names of the visible sub-folders, and links to folders, sorted by their bytes."""
    # Sorted by bytes, since the locale must not change the order.
    with os.scandir(root) as entries:
        names = [
            entry.name
            for entry in entries
            if not is_hidden(entry.name) and is_folder(entry)
        ]
    return sorted(names, key=os.fsencode)


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Return True for a folder or a link to one."""
    try:
        return entry.is_dir()
    except OSError:  # a link in a circle, or into a closed folder
        return False
