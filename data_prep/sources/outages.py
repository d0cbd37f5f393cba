"""Tell outages (storage or machine failed) from faults of one file, and report them.

Owns: which system errors are outages, their messages, and the error for a changed source.
Leaves out: faults of a file (`shards.ledger`), errors of the output (`pipeline`).
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from vitscale.config.errors import UserError
from vitscale.data.shards import DATA_LOSS_ERRNOS

# Errors of the file itself: lost bytes, no permission, no file. All others are transient: a server
# that does not answer, no memory, no file handles, an expired key.
FILE_FAULTS = frozenset(
    {
        *DATA_LOSS_ERRNOS,
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
    """A file name as valid UTF-8; other bytes become \\xNN."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


class Interrupted(UserError):
    """An outage: the corpus is intact, and the same command resumes the work."""


def raise_if_outage(error: OSError, path: str) -> None:
    """Raise Interrupted if an error does not come from the file at `path` of the source itself.

    Errors without a number come from libraries and concern the file's content.
    """
    if error.errno is not None and error.errno not in FILE_FAULTS:
        raise source_read_error(error, path) from None


def source_read_error(error: OSError, path: str) -> Interrupted:
    return Interrupted(
        f"the source cannot be read ({error.strerror or error}); the work done so far is kept",
        where=repr(printable(path)),
        next_step="fix this and run the same command again; it resumes",
    )


def source_missing_error(root: Path, work: Path) -> Interrupted:
    """The source is missing, as when it is not mounted; the work done so far is kept."""
    return Interrupted(
        f"{str(root)!r}, or a folder of it, is missing or empty; the work done so far is kept in "
        f"{work.name}",
        where="source.path",
        next_step="mount it on this machine and run the same command again, which resumes; or "
        f"remove {work} to start over",
    )


def is_source_missing(root: Path, path: str) -> bool:
    """Whether the source, or the folder of this file, is missing or empty.

    This is the state of an unmounted file system; a file that was deleted has siblings.
    """
    full = os.path.join(root, path)
    for folder in (root, full if os.path.isdir(full) else os.path.dirname(full)):
        try:
            with os.scandir(folder) as entries:
                if next(entries, None) is None:
                    return True
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError as error:
            if error.errno not in FILE_FAULTS - set(DATA_LOSS_ERRNOS):
                return True
    return False


class ChangedSource(UserError):
    """The source changed after it was listed."""

    file: str
    """The changed file or folder, relative to the source's root."""


def changed_source_error(path: str, *, file: str | None = None) -> ChangedSource:
    """The input at `path` changed; `file` contains it, if that is another file."""
    error = ChangedSource(
        "changed while the shards were made",
        where=repr(printable(path)),
        next_step="run the command again once the source no longer changes",
    )
    error.file = file or path
    return error
