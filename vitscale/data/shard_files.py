"""Byte ranges of shards.

Owns: open files, one set per process; which errors are a file's own.
Leaves out: which range is which sample (`index`).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from vitscale.config.errors import UserError

MAX_OPEN_SHARDS = 64
# Bytes that are lost: a bad block, a checksum or structure that the file system finds broken. With
# every other error (stale handle, no memory, too many open files, ...) they are there another day.
LOST = (errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.ENODATA)


class ShardFiles:
    """The shards of one split; copied into worker processes without open files."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(os.fspath(path) for path in paths)

    def read(self, shard: int, *, offset: int, num_bytes: int) -> bytes:
        """Bytes of one range. Raises OSError when they are lost or end too early, UserError when
        the file cannot be reached."""
        try:
            data = os.pread(_descriptor(self.paths[shard], os.getpid()), num_bytes, offset)
        except OSError as error:
            if error.errno in LOST:
                raise
            raise UserError(
                f"cannot be read ({error.strerror})",
                where=self.paths[shard],
                next_step="check the storage and the limits of this machine (ulimit -n, memory), "
                "and run the same command again",
            ) from None
        if len(data) < num_bytes:
            raise OSError(f"ends after {offset + len(data)} bytes")
        return data


@cache
def _open_files(process: int) -> _OpenFiles:
    return _OpenFiles()


class _OpenFiles:
    """The most recently used files, open; closed when others take their place."""

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
    # By process: a descriptor shared with a forked process would be closed under its hands.
    return _open_files(process).get(path)
