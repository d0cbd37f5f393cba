"""Tar files whose every byte is decided here.

Owns: the tar layout of one shard and the division of samples over shards.
Leaves out: which samples, in what order (`sample_order`), and the index (`vitscale.data.index`).

webdataset's TarWriter could be made deterministic, but it does not tell at which byte a member's
content begins, and the index needs just that; a ustar header is one call into the standard library.
"""

from __future__ import annotations

import os
import tarfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import blake3

from vitscale.data.index import ShardEntry

BLOCK = tarfile.BLOCKSIZE


def padded(num_bytes: int) -> int:
    """Bytes that content takes inside a tar: whole blocks."""
    return -(-num_bytes // BLOCK) * BLOCK


def sample_bytes(image_bytes: int) -> int:
    """Bytes of one sample: two headers, the image, one block for the label."""
    return padded(image_bytes) + 3 * BLOCK


def shard_lengths(image_bytes: list[int], *, shard_mib: float, min_shards: int) -> tuple[int, ...]:
    """Samples per shard, as even as can be: readers take turns over shards of equal length."""
    total = sum(map(sample_bytes, image_bytes))
    num_shards = max(min_shards, -(-total // int(shard_mib * 2**20)))
    num_shards = min(num_shards, len(image_bytes))
    share, rest = divmod(len(image_bytes), num_shards)
    return tuple(share + (i < rest) for i in range(num_shards))


class TarShard:
    """Writes one tar; after the block, `entry` describes it and it is on disk to stay."""

    entry: ShardEntry

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open(path, "xb")
        self._digest = blake3.blake3()
        self._position = 0
        self._samples = 0

    def __enter__(self) -> TarShard:
        return self

    def add(self, key: str, *, extension: str, image: bytes, label: int) -> int:
        """Append `key.extension` and `key.cls`; returns the image's byte offset in the tar."""
        offset = self._member(f"{key}.{extension}", image)
        self._member(f"{key}.cls", str(label).encode())
        self._samples += 1
        return offset

    def _member(self, name: str, content: bytes) -> int:
        header = tarfile.TarInfo(name)
        header.size, header.mtime, header.mode = len(content), 0, 0o644
        self._write(header.tobuf(tarfile.USTAR_FORMAT))
        offset = self._position
        self._write(content + bytes(padded(len(content)) - len(content)))
        return offset

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)
        self._position += len(data)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            # The folder is thrown away; a second error, from flushing, would hide the first.
            with suppress(OSError):
                self._file.close()
            return
        self._write(bytes(2 * BLOCK))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self.entry = ShardEntry(
            name=self.path.name,
            samples=self._samples,
            bytes=self._position,
            blake3=self._digest.hexdigest(),
        )
