"""Errors that say nothing about the corpus: storage or this machine failed, and the work is kept.

Owns: which errors of the system are outages and not faults of one file, and their message.
Leaves out: what a fault of a file means (`ledger`), and errors of the output (`pipeline`).
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from vitscale.config.errors import UserError
from vitscale.data.shard_files import LOST

# What a file itself can be: lost bytes, no permission, no file. Whatever else a system reports (a
# server that does not answer, no memory, no file handles, an expired key) is gone another day.
FILE_FAULTS = frozenset(
    {
        *LOST,
        errno.EACCES,
        errno.EINVAL,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.ENXIO,
        errno.EOVERFLOW,
        errno.EPERM,
        errno.ESPIPE,
    }
)


def printable(name: str) -> str:
    """A file name as valid UTF-8; bytes that are not become \\xNN."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


class Interrupted(UserError):
    """Nothing is wrong with the corpus: the same command, run again, goes on."""


def raise_if_outage(error: OSError, path: str) -> None:
    """Raise Interrupted for an error that is no property of the file at `path` of the source.

    An error without a number is a library's word on the bytes.
    """
    if error.errno is not None and error.errno not in FILE_FAULTS:
        raise source_read_error(error, path) from None


def source_read_error(error: OSError, path: str) -> Interrupted:
    return Interrupted(
        f"the source cannot be read ({error.strerror or error}); the work done so far is kept",
        where=repr(printable(path)),
        next_step="mend this and run the same command again: it goes on where it was",
    )


def source_missing_error(root: Path, work: Path) -> Interrupted:
    """For people: the source is not there; nothing of the work so far is lost."""
    return Interrupted(
        f"{str(root)!r}, or a folder of it, is missing or empty; the work done so far is kept in "
        f"{work.name}",
        where="source.path",
        next_step="mount it on this machine and run the same command again: it goes on where it "
        f"was; or, to begin anew, remove {work}",
    )


def is_source_missing(root: Path, path: str) -> bool:
    """Whether the source, or the folder of this file of it, is missing or empty.

    So it looks where a file system is not mounted; a file that somebody removed has neighbours.
    """
    place = os.path.join(root, path)
    for folder in (root, place if os.path.isdir(place) else os.path.dirname(place)):
        try:
            with os.scandir(folder) as entries:
                if next(entries, None) is None:
                    return True
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError as error:
            if error.errno not in FILE_FAULTS - set(LOST):
                return True
    return False


class ChangedSource(UserError):
    """The source is not what was listed."""

    file: str
    """The file or folder in which that showed, relative to the source's root."""


def changed_source_error(path: str, *, file: str | None = None) -> ChangedSource:
    """For people: the input at `path` changed; `file` is what holds it, where that is another."""
    error = ChangedSource(
        "changed while the shards were made",
        where=repr(printable(path)),
        next_step="run the command again once the source no longer changes",
    )
    error.file = file or path
    return error
