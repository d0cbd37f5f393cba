"""Read byte ranges of local shards.

Owns: open files, one set per process; which errors mean lost data.
Leaves out: the ranges of samples (`index`).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from vitscale.config.errors import UserError

MAX_OPEN_SHARDS = 64
# Data are lost: a bad block, or a checksum or structure that the file system finds broken. Other
# errors (stale handle, no memory, too many open files, ...) are transient.
DATA_LOSS_ERRNOS = (errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.ENODATA)


class ShardFiles:
    """The shards of one split. Holds no open files, so it can be copied into worker processes."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(os.fspath(path) for path in paths)

    def read(self, shard: int, *, offset: int, num_bytes: int) -> bytes:
        """Bytes of one range. Raises OSError if they are lost or the file is too short, UserError
        if the file cannot be accessed."""
        try:
            data = os.pread(_descriptor(self.paths[shard], os.getpid()), num_bytes, offset)
        except OSError as error:
            if error.errno in DATA_LOSS_ERRNOS:
                raise
            raise UserError(
                f"cannot be read ({error.strerror})",
                where=self.paths[shard],
                next_step="check the storage and the limits of this machine (ulimit -n, memory), "
                "then run the same command again",
            ) from None
        if len(data) < num_bytes:
            raise OSError(f"ends after {offset + len(data)} bytes")
        return data


@cache
def _open_files(process: int) -> _OpenFiles:
    return _OpenFiles()


class _OpenFiles:
    """Least-recently-used cache of open files."""

    def __init__(self) -> None:
        self.descriptors: dict[str, int] = {}

    def get(self, path: str) -> int:
        descriptor = self.descriptors.pop(path, None)
        if descriptor is None:
            descriptor = os.open(path, os.O_RDONLY)
            if len(self.descriptors) >= MAX_OPEN_SHARDS:
                os.close(self.descriptors.pop(next(iter(self.descriptors))))
        self.descriptors[path] = descriptor  # last: most recently used
        return descriptor


def _descriptor(path: str, process: int) -> int:
    # Per process: a forked process must not close descriptors that its parent uses.
    return _open_files(process).get(path)
