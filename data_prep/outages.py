"""Errors that say nothing about the corpus: storage or this machine failed, and the work is kept.

Owns: which errors of the system are outages and not faults of one file, and their message.
Leaves out: what a fault of a file means (`ledger`), and errors of the output (`pipeline`).
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from data_prep.inputs import printable
from vitscale.errors import UserError

# A server that does not answer, or a machine without memory or file handles. EIO is none of them:
# a bad disk sector is a property of one file.
OUTAGES = frozenset(
    {
        errno.ENOMEM,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOBUFS,
        errno.ENODEV,
        errno.ENOTCONN,
        errno.ESHUTDOWN,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETRESET,
        errno.ENETUNREACH,
    }
)


class Interrupted(UserError):
    """Nothing is wrong with the corpus: the same command, run again, goes on."""


def refuse_outage(error: OSError, path: str) -> None:
    """Raise Interrupted for an error that is no property of the file at `path` of the source."""
    if error.errno in OUTAGES:
        raise source_error(error, path) from None


def source_error(error: OSError, path: str) -> Interrupted:
    return Interrupted(
        f"the source cannot be read ({error.strerror or error}); the work done so far is kept",
        where=repr(printable(path)),
        next_step="mend this and run the same command again: it goes on where it was",
    )


def away(root: Path, work: Path) -> Interrupted:
    """For people: the source is not there; nothing of the work so far is lost."""
    return Interrupted(
        f"{str(root)!r}, or a folder of it, is missing or empty; the work done so far is kept in "
        f"{work.name}",
        where="source.path",
        next_step="mount it on this machine and run the same command again: it goes on where it "
        f"was; or, to begin anew, remove {work}",
    )


def is_away(root: Path, path: str) -> bool:
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
            if error.errno in OUTAGES | {errno.EIO}:
                return True
    return False
