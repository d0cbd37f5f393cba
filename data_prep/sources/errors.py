"""Tell outages (storage or machine failed) from faults of one file, and report them.

Reads the files that settings name.
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
        *(errno.EACCES, errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG),
        *(errno.ENOENT, errno.ENOTDIR, errno.ENXIO, errno.EOVERFLOW, errno.EPERM, errno.ESPIPE),
    }
)


def printable(name: str | bytes) -> str:
    """Return a file name as valid UTF-8; other bytes become \\xNN."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


class Outage(UserError):
    """The corpus is intact, and the same command resumes the work."""


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
    """Raise Outage if an error does not come from the file at `path` of the source itself.

    Errors without a number come from libraries and concern the file's content.
    """
    if error.errno is not None and error.errno not in FILE_FAULTS:
        raise source_read_error(error, path) from None


def source_read_error(error: OSError, path: str) -> ChangedSource | Outage:
    """Return the error for a listed file or folder that is gone, or storage that fails."""
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return ChangedSource(path)
    return Outage(
        f"the source cannot be read ({error.strerror or error}); the work done so far is kept",
        where=repr(printable(path)),
        next_step="fix this and run the same command again; it resumes",
    )


def check_is_mounted(root: Path, path: str, *, work: Path) -> None:
    """Raise Outage if the source, or the folder of this file, is missing or empty.

    This is the state of an unmounted file system; a file that was deleted has siblings.
    """
    for folder in (root, (root / path).parent):
        if not folder.is_dir() or next(os.scandir(folder), None) is None:
            raise Outage(
                f"{str(folder)!r} is missing or empty; the work done so far is kept in {work.name}",
                where="source.path",
                next_step="mount it on this machine and run the same command again, which "
                f"resumes; or remove {work} to start over",
            )


def read_named(file: str, *, where: str) -> bytes:
    """Return the content of a file that the setting `where` names. Raises Outage."""
    try:
        return Path(file).expanduser().read_bytes()
    except OSError as error:
        what = f"{file!r} cannot be read ({error.strerror or error})"
        raise Outage(what, where=where) from None


def read_text(file: str, *, where: str) -> str:
    """Return the text of a file that the setting `where` names. Raises UserError, Outage."""
    try:
        return read_named(file, where=where).decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file!r} is not UTF-8 (byte {error.start})", where=where, allowed="UTF-8 text"
        ) from None
