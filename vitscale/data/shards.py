"""Read byte ranges of local shards; check that shards are there.

Owns: open files; which errors mean lost data; sizes of files.
Leaves out: the ranges of samples (`index`).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from functools import lru_cache
from io import FileIO
from pathlib import Path

from vitscale.config.errors import UserError, UserErrors
from vitscale.data.storage import Location

MAX_OPEN_SHARDS = 64
MAX_ERRORS_SHOWN = 10
# Data are lost: a bad block, or a checksum or structure that the file system finds broken. Other
# errors (stale handle, no memory, too many open files, ...) are transient.
DATA_LOSS_ERRNOS = (errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.ENODATA)


def read_shard(path: Path, *, offset: int, num_bytes: int) -> bytes:
    """Bytes of one range. Raises OSError if they are lost or the file is too short, UserError if
    the file cannot be accessed."""
    try:
        data = os.pread(_opened(path).fileno(), num_bytes, offset)
    except OSError as error:
        if error.errno in DATA_LOSS_ERRNOS:
            raise
        raise UserError(
            f"cannot be read ({error.strerror})",
            where=str(path),
            next_step="check the storage and the limits of this machine (ulimit -n, memory), then "
            "run the same command again",
        ) from None
    if len(data) < num_bytes:
        raise OSError(f"ends after {offset + len(data)} bytes")
    return data


@lru_cache(maxsize=MAX_OPEN_SHARDS)
def _opened(path: Path) -> FileIO:
    """A file is closed when the cache forgets it."""
    return open(path, "rb", buffering=0)


def check_sizes(expected: Mapping[Path, int], *, folder: Location, split: str) -> None:
    """Raise UserError for missing and wrongly sized files; at most ten are listed in full.

    expected: bytes of each file of a split. folder: of the index.
    """
    errors = []
    for path, num_bytes in expected.items():
        try:
            found = path.stat().st_size
        except OSError as error:
            errors.append(UserError(f"missing ({error.strerror})", where=str(path)))
            continue
        if found != num_bytes:
            what = f"{found} bytes, but the manifest says {num_bytes}"
            errors.append(UserError(what, where=str(path)))
    if not errors:
        return
    shown = errors[:MAX_ERRORS_SHOWN]
    rest = f"{len(errors) - len(shown)} more such files; " if len(errors) > len(shown) else ""
    advice = UserError(
        f"{rest}{len(errors)} of {len(expected)} files of split {split!r} cannot be used",
        where=str(folder),
        next_step="copy the folder again, or make the shards again",
    )
    raise UserErrors([*shown, advice])
