"""Byte ranges of shards.

Owns: open files, one set per process.
Leaves out: which range is which sample (`index`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

MAX_OPEN_SHARDS = 64


class ShardFiles:
    """The shards of one split; copied into worker processes without open files."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(os.fspath(path) for path in paths)

    def read(self, shard: int, *, offset: int, num_bytes: int) -> bytes:
        """Bytes of one range. Raises OSError when they cannot be had in full."""
        data = os.pread(_descriptor(self.paths[shard], os.getpid()), num_bytes, offset)
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
