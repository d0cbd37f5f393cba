"""Define the interface of a source: containers, the inputs in them, and the errors of reading them.

An outage (storage or machine failed) is told from a fault of one file.
"""

from __future__ import annotations

import errno
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import ClassVar, NamedTuple

import pyarrow as pa

from vitscale.config.errors import StorageError, UserError
from vitscale.config.outside import visible
from vitscale.data.positions import DATA_LOSS_ERRNOS
from vitscale.data.tar_members import CompressedTar, TarDefect
from vitscale.runs.data_prep import SOURCES, LabelSettings, SourceSettings

MAX_CLASS_LENGTH = 4096
# The class of every image of a source whose classes are ignored.
NO_CLASS = ""
# Errors of the file itself: lost bytes, no permission, no file. All others are transient: a server
# that does not answer, no memory, no file handles, an expired key.
FILE_FAULTS = {
    getattr(errno, name)
    for name in """
    EIO EACCES EINVAL EISDIR ELOOP ENAMETOOLONG ENOENT ENOTDIR ENXIO EOVERFLOW EPERM ESPIPE
    """.split()
}.union(DATA_LOSS_ERRNOS)


class Container(NamedTuple):
    """The unit of listing: a class folder, tar or table. All of them fit in memory."""

    path: str
    """Relative to the source's root, as the operating system gives it."""
    split: str
    class_name: str | None = None
    """Class of every image in it; None: each input has its own."""
    file: str = ""
    """File that contains it, relative to the root, if that is not `path` (tar in a tar)."""
    offset: int = 0
    """First byte inside `file`."""
    num_bytes: int = -1
    base: str = ""
    """Folder that the names of its inputs are relative to, if that is not `path`."""
    only_files: bool = False
    """Its visible sub-folders are containers of their own."""


# It is not frozen: that would take 3 of the 11 us that listing a file takes.
@dataclass(slots=True)
class Input:
    """One input of the source. `reason` is set if its name or type already rejects it."""

    path: str
    """Unique name in the source and in the ledger: a path relative to the source's root; inside a
    tar TAR/MEMBER, inside a table TABLE/ROW."""
    split: str
    class_name: str | None
    name: str
    """Identifies it within its class: path inside the class, without suffix."""
    num_bytes: int
    reason: str | None = None
    file: str = ""
    """File that contains the bytes, relative to the root; empty: the file at `path`."""
    offset: int = 0
    modified_ns: int = 0
    """Modification time of the file when it was listed."""
    inode: int = 0
    """Of the file, where it is one input: links to it have the same. 0: unknown."""
    spooled: bool = False
    """`file` is in the spool, not in the source."""
    data: bytes | None = None
    """Bytes that can be read only once, such as a cell of a compressed table: for the spool."""

    def set_status(self, status: os.stat_result) -> None:
        self.num_bytes = status.st_size
        self.modified_ns = status.st_mtime_ns
        self.inode = status.st_ino or 1


@dataclass(frozen=True)
class Source(ABC):
    """One kind of source. Listing is deterministic, except for the order within a container."""

    settings: SourceSettings
    labels: LabelSettings = LabelSettings()
    has_label_values: ClassVar[bool] = True
    """Classes are stored as label values, not as the names of files or folders: numbers among them
    keep their value, and 2 comes before 10."""

    @property
    def root(self) -> Path:
        """The folder that all paths are relative to."""
        return source_root(self.settings)

    def labelled(self, item: Input) -> Input:
        """Reject an input without a label."""
        # Without labels nothing is missing.
        needs_label = item.class_name is None and self.labels.values != "none"
        if item.reason is None and needs_label:
            item.reason = "no_label"
        return item

    @abstractmethod
    def containers(self) -> list[Container]:
        """All containers, ordered. Raises UserError(s) for an unusable source."""

    @abstractmethod
    def inputs(self, container: Container) -> Iterator[Input]:
        """Every input of one container, rejected ones too. Raises what `with_damage` expects."""


def open_source(settings: SourceSettings, labels: LabelSettings) -> Source:
    """The source that the settings name. Reads nothing before `containers` is called."""
    # Loaded by name: a kind of source imports what only it needs.
    kind = resolve_name(f"data_prep.sources.{SOURCES[settings.kind]}")
    source: Source = kind(settings, labels)
    return source


def source_root(settings: SourceSettings) -> Path:
    """`source.path`, or the folder of that file."""
    path = Path(settings.path)
    # Paths are relative to a folder, also where a single file is the source.
    if path.is_file():
        return path.parent
    return path


def with_damage(container: Container, inputs: Iterable[Input]) -> Iterator[Input]:
    """Yield the inputs of a container, then a row for it if the rest of it cannot be read.

    Raises ChangedSource if it is gone, StorageError, UserError for a compressed tar.
    """
    path = container.file or container.path
    try:
        yield from inputs
        return
    except CompressedTar:
        raise compressed_tar_error(container.path) from None
    except TarDefect:
        reason = "truncated_tar"
    except (pa.ArrowException, UnicodeDecodeError):
        reason = "damaged_table"
    except FileNotFoundError as error:
        raise source_read_error(error, path) from None
    except OSError as error:
        # An outage concerns all files, so it must not reject this one.
        raise_if_outage(error, path)
        # Without a number it comes from a library, and concerns the content.
        reason = "damaged_table" if error.errno is None else "unreadable"

    yield Input(path, container.split, container.class_name, path, 0, reason)


def class_from_cell(
    label: object, settings: LabelSettings, names: tuple[str, ...] | None = None
) -> str | None:
    """Class from a label: text, or a number, which `names` may name.

    None: no label, which null, other types, empty text and unnamed numbers are. So are negative
    numbers, but with a space or map they are unknown classes like any other: see `unknown`.
    """
    # True and false are integers in Python, but no labels.
    if isinstance(label, int) and not isinstance(label, bool):
        if names is not None:
            if 0 <= label < len(names):
                return names[label]
            return None
        # Negative numbers often stand for a missing label.
        if label >= 0:
            return str(label)
        return None
    if not isinstance(label, str) or len(label) > MAX_CLASS_LENGTH:
        return None

    # Programs on Windows begin a file with a byte order mark.
    text = label.removeprefix("\ufeff").strip()
    is_mapped = settings.space is not None or settings.map is not None
    is_negative = re.fullmatch(r"-[0-9]+", text) is not None
    if not text or (is_negative and not is_mapped):
        return None
    return text


def printable(name: os.PathLike[str] | str | bytes) -> str:
    """Return a file name as valid UTF-8; other bytes and control characters become \\xNN."""
    return visible(os.fsencode(name).decode("utf-8", "backslashreplace"))


def compressed_tar_error(path: str) -> UserError:
    return UserError(
        f"{printable(path)!r} is compressed: its images cannot be read one by one",
        where="source.path",
        allowed="plain tar files",
        next_step="uncompress it first (gunzip, unxz, ...); its size hardly changes",
    )


class ChangedSource(UserError):
    """The source changed after it was listed."""

    def __init__(self, path: str) -> None:
        """path: of the changed file or folder, relative to the source."""
        self.path = path
        super().__init__(
            "changed while the shards were made",
            where=repr(printable(path)),
            next_step="run the command again once the source no longer changes",
        )


def raise_if_outage(error: OSError, path: str) -> None:
    """Raise StorageError if an error does not come from the file at `path` of the source itself.

    Errors without a number come from libraries and concern the file's content.
    """
    if error.errno is not None and error.errno not in FILE_FAULTS:
        raise source_read_error(error, path) from None


def source_read_error(error: OSError, path: str) -> ChangedSource | StorageError:
    """Return the error for a listed file or folder that is gone, or storage that fails."""
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return ChangedSource(path)
    return StorageError(
        f"the source cannot be read ({error.strerror or error}); the work done so far is kept",
        where=repr(printable(path)),
        next_step="fix this and run the same command again; it resumes",
    )


def check_is_mounted(root: Path, path: str, *, work: Path) -> None:
    """Raise StorageError if the source, or the folder of this file, is missing or empty.

    This is the state of an unmounted file system; a file that was deleted has siblings.
    """
    for folder in (root, (root / path).parent):
        # An empty folder is what an unmounted file system looks like.
        if not folder.is_dir() or next(os.scandir(folder), None) is None:
            raise StorageError(
                f"{str(folder)!r} is missing or empty; the work done so far is kept in {work.name}",
                where="source.path",
                next_step="mount it on this machine and run the same command again, which "
                f"resumes; or remove {work} to start over",
            )
