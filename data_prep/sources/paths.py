"""Resolve the paths of a source and its splits, classify file names and links, walk folders.

Owns: the root of a source, the folder or file of each split, names of images and tars, hidden
names, links, the walk through a folder.
Leaves out: which folders are classes, and the content of tars and tables (one module per kind).
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from data_prep.sources.outages import Interrupted, changed_source_error
from data_prep.sources.protocol import Container, Input
from vitscale.config.errors import UserError, UserErrors
from vitscale.distributed.atomic_files import blake3_of_file
from vitscale.runs.data_prep import SourceSettings

# Files with these names are opened and checked. Unsupported formats are included, so that a folder
# of .bmp files is reported as unsupported images and not ignored as other files.
IMAGE_SUFFIXES = frozenset(
    "jpg jpeg jpe jfif mpo png apng webp bmp gif tif tiff heic heif avif jp2 ppm".split()
)
# Lists and maps are held in memory, at about ten times their size.
MAX_FILE_MIB = 64
# No permission, or a path beyond the system's limit (PATH_MAX, 4,096 bytes on Linux).
CLOSED_ERRNOS = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)


@dataclass(frozen=True, slots=True)
class SplitRoot:
    """The folder or file of a split."""

    split: str
    path: str
    """Relative to the source's root; empty: the root itself."""
    where: str
    """Configuration key that named it."""


def source_root(settings: SourceSettings) -> Path:
    """The folder that all paths of a source are relative to."""
    path = Path(settings.path).expanduser()
    return path.parent if path.is_file() else path


def find_split_roots(settings: SourceSettings, *, may_be_file: bool) -> list[SplitRoot]:
    """Roots of all splits. Raises UserError(s) if one is missing, outside, or inside another."""
    top = Path(settings.path).expanduser()
    kinds = "file or folder" if may_be_file else "folder"
    if not top.exists():
        raise UserError(f"{settings.path!r}: no such {kinds}", where="source.path")
    if not (top.is_dir() or (may_be_file and top.is_file())):
        raise UserError(f"{settings.path!r}: is not a {kinds}", where="source.path")
    if top.is_file():
        if settings.splits:
            raise UserError("needs a folder as source.path", where="source.splits")
        return [SplitRoot("train", top.name, "source.path")]
    roots, errors = [], []
    for split, path in (settings.splits or {"train": "."}).items():
        where = f"source.splits.{split}" if settings.splits else "source.path"
        problem = _split_root_problem(top, path, may_be_file=may_be_file)
        if problem:
            errors.append(UserError(problem, where=where))
        roots.append(SplitRoot(split, "" if os.path.normpath(path) == "." else path, where))
    errors = errors or _overlaps(top, roots)
    if errors:
        raise UserErrors(errors)
    return [SplitRoot(one.split, _normal(one.path), one.where) for one in roots]


def _normal(path: str) -> str:
    return os.path.normpath(path) if path else ""


def _split_root_problem(top: Path, path: str, *, may_be_file: bool) -> str | None:
    full = top / path
    if not (full.is_dir() or (may_be_file and full.is_file())):
        return f"{str(full)!r}: no such {'file or folder' if may_be_file else 'folder'}"
    if not full.resolve().is_relative_to(top.resolve()):
        return f"{str(full)!r} is outside source.path"
    return None


def _overlaps(top: Path, roots: Sequence[SplitRoot]) -> list[UserError]:
    """Errors for roots inside each other, which would store an image twice."""
    for i, one in enumerate(roots):
        for other in roots[:i]:
            a, b = (top / one.path).resolve(), (top / other.path).resolve()
            if a.is_relative_to(b) or b.is_relative_to(a):
                what = f"two splits share files ({other.split} and {one.split})"
                return [UserError(what, where="source.splits", allowed="separate folders")]
    return []


def hash_named_file(file: Path, *, where: str) -> str:
    """BLAKE3 of a file that the setting `where` names. Raises Interrupted if it cannot be read."""
    try:
        return blake3_of_file(file)
    except OSError as error:
        what = f"{str(file)!r} cannot be read ({error.strerror or error})"
        raise Interrupted(what, where=where) from None


def read_text(path: Path, *, where: str) -> str:
    """The text of a file that the setting `where` names. Raises UserError if it is not UTF-8."""
    try:
        if path.stat().st_size > MAX_FILE_MIB << 20:
            raise UserError(
                f"{str(path)!r} has more than {MAX_FILE_MIB} MiB, too much to hold in memory",
                where=where,
                next_step="put the label of each image in a table: source.kind=path_table",
            )
        return path.read_bytes().decode()
    except OSError as error:
        raise Interrupted(f"{str(path)!r} cannot be read ({error.strerror})", where=where) from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"{str(path)!r} is not UTF-8 (byte {error.start})", where=where, allowed="UTF-8 text"
        ) from None


def stem_and_suffix(name: str) -> tuple[str, str]:
    """`a.b.JPG` -> (`a.b`, `JPG`); without a dot the suffix is empty."""
    stem, dot, suffix = name.rpartition(".")
    return (stem, suffix) if dot else (name, "")


def is_image_name(name: str) -> bool:
    """Whether a name has the suffix of an image."""
    suffix = stem_and_suffix(name)[1]
    return suffix in IMAGE_SUFFIXES or suffix.lower() in IMAGE_SUFFIXES


def is_tar_name(name: str) -> bool:
    return name.lower().endswith(".tar") and not is_hidden(name)


def is_hidden(path: str) -> bool:
    """Whether a part of a relative path starts with a dot; `.` and `..` do not count."""
    return (path.startswith(".") or "/." in path) and any(
        part.startswith(".") and part not in (".", "..") for part in path.split("/")
    )


def normalized_name(name: str) -> str:
    """A member's name without `./`, `//`, and slashes at either end."""
    if "./" not in name and "//" not in name and name[:1] != "/" and name[-1:] not in ("/", "."):
        return name
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def link_reason(path: str, *, real_root: str, real_folders: Sequence[str]) -> str | None:
    """Why a link is not followed: it is broken, leads out of the source, or forms a loop.

    real_folders: the folder of the link, and the folders of the links followed to get there.
    """
    target = os.path.realpath(path)
    if not os.path.exists(path):
        return "link_broken"  # also links that form a cycle
    if not is_inside(target, real_root):
        return "link_outside"
    if os.path.isdir(target) and any(is_inside(folder, target) for folder in real_folders):
        return "link_loop"
    return None


def is_inside(path: str, folder: str) -> bool:
    """Whether a resolved path is `folder` or inside it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def stat_entry(entry: os.DirEntry[str], path: str) -> os.stat_result:
    """`stat` of a link's target; raises if the file is gone since its folder was read."""
    try:
        return entry.stat()
    except FileNotFoundError:
        raise changed_source_error(path) from None


def stat_listed(root: Path, path: str) -> os.stat_result:
    """`stat` of a listed file; raises if it is gone."""
    try:
        return os.stat(root / path)
    except FileNotFoundError:
        raise changed_source_error(path) from None


@contextmanager
def opened(root: Path, path: str) -> Iterator[int]:
    """A file descriptor; opening a pipe does not wait for its writer."""
    fd = os.open(root / path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def file_reason(name: str, mode: int, *, hidden: bool) -> str | None:
    """Why the type or name of a file rejects it."""
    if stat.S_IFMT(mode) != stat.S_IFREG:
        return "not_a_file"
    if hidden:
        return "hidden"
    return None if is_image_name(name) else "other_name"


Entries = AbstractContextManager[Iterator[os.DirEntry[str]]]
IsContainer = Callable[[os.DirEntry[str]], bool]


@dataclass(frozen=True, slots=True)
class _Folder:
    """A folder not walked yet."""

    path: str
    link_folders: tuple[str, ...]
    """Resolved folders of the links followed to get here."""
    hidden: bool


def walk_folder(root: Path, container: Container, *, is_container: IsContainer) -> Iterator[Input]:
    """All files of a class folder; without a class, the files beside the other containers.

    is_container: whether a visible entry of a folder without class is another container.
    Links are followed inside the source only, and never to a folder that contains one of the links
    followed so far: that would not end.
    """
    real_root = os.path.realpath(root)
    top = "" if container.path == "." else container.path
    name_start = len(top) + 1 if top else 0
    parent = os.path.realpath(os.path.dirname(os.path.join(root, top)))
    is_link = container.class_name is not None and os.path.islink(os.path.join(root, top))
    stack = [_Folder(top, (parent,) if is_link else (), hidden=False)]
    split, class_name = container.split, container.class_name
    while stack:
        folder = stack.pop()
        full = os.path.join(root, folder.path)
        entries = _open_folder(full, folder.path)
        if entries is None:
            yield Input(folder.path, split, class_name, folder.path[name_start:], 0, "unreadable")
            continue
        prefix = folder.path + "/" if folder.path else ""
        is_shared = class_name is None and folder.path == top
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
                if is_shared and reason is None and not hidden and is_container(entry):
                    continue
                if reason is None and entry.is_dir():
                    stack.append(_Folder(path, link_folders, hidden))
                    continue
                num_bytes = modified_ns = 0
                if reason is None:
                    num_bytes, modified_ns, reason = _file_facts(entry, path, hidden=hidden)
                    if reason is None and class_name is None:
                        reason = "no_class"
                name = prefix[name_start:] + stem_and_suffix(entry.name)[0]
                yield Input(
                    path, split, class_name, name, num_bytes, reason, modified_ns=modified_ns
                )


def _file_facts(entry: os.DirEntry[str], path: str, *, hidden: bool) -> tuple[int, int, str | None]:
    """(size, modification time, why its type or name rejects it)."""
    try:
        status = stat_entry(entry, path)
    except OSError as error:
        if error.errno in CLOSED_ERRNOS:
            return 0, 0, "unreadable"
        raise
    reason = file_reason(entry.name, status.st_mode, hidden=hidden)
    return status.st_size, status.st_mtime_ns, reason


def _open_folder(full: str, path: str) -> Entries | None:
    """The entries of a folder; None if it cannot be opened."""
    try:
        return os.scandir(full)
    except (FileNotFoundError, NotADirectoryError):
        raise changed_source_error(path) from None
    except OSError as error:
        if error.errno in CLOSED_ERRNOS:
            return None
        raise
