"""Tar files whose every byte is decided here.

Owns: the tar layout of one shard.
Leaves out: which samples, in what order (`planning`), and the index (`vitscale.data.index`).

webdataset's TarWriter could be made deterministic, but it does not tell at which byte a member's
content begins, and the index needs just that. Headers are made from a template: the standard
library's take 43 microseconds each, a third of what copying a photograph takes.
"""

from __future__ import annotations

import errno
import os
import tarfile
from functools import cache
from pathlib import Path

import blake3

BLOCK = tarfile.BLOCKSIZE
NAME_BYTES, SIZE_FIELD, SUM_FIELD = 100, slice(124, 136), slice(148, 156)
MAX_MEMBER_BYTES = 8**11
FLUSH_BYTES = 16 << 20
# Two headers, one block for the label, half a block of padding on average.
SAMPLE_OVERHEAD = 3 * BLOCK + BLOCK // 2


@cache
def _template() -> tuple[bytearray, int]:
    """A ustar header without name, size and checksum; and the sum of its bytes."""
    member = tarfile.TarInfo("")
    member.mtime, member.mode = 0, 0o644
    header = bytearray(member.tobuf(tarfile.USTAR_FORMAT))
    header[SIZE_FIELD] = bytes(12)
    header[SUM_FIELD] = b" " * 8
    return header, sum(header)


def ustar_header(name: str, num_bytes: int) -> bytes:
    """The 512 bytes before a member, as `tarfile.TarInfo(name).tobuf(USTAR_FORMAT)` makes them."""
    raw = name.encode("ascii")
    assert 0 < len(raw) <= NAME_BYTES and 0 <= num_bytes < MAX_MEMBER_BYTES
    size = b"%011o\0" % num_bytes
    template, template_sum = _template()
    header = bytearray(template)
    header[: len(raw)] = raw
    header[SIZE_FIELD] = size
    header[SUM_FIELD] = b"%06o\0 " % (template_sum + sum(raw) + sum(size))
    return bytes(header)


class TarShard:
    """Writes one tar to an unfinished file; `finish` flushes it to disk."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        self._digest = blake3.blake3()
        self.num_bytes = self._flushed = 0

    def __enter__(self) -> TarShard:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def add(self, key: str, *, extension: str, image: bytes, label: int) -> int:
        """Append `key.extension` and `key.cls`; returns the image's byte offset in the tar."""
        text = str(label).encode()
        offset = self.num_bytes + BLOCK
        self._write(
            ustar_header(f"{key}.{extension}", len(image)),
            image,
            bytes(-len(image) % BLOCK)
            + ustar_header(f"{key}.cls", len(text))
            + text.ljust(BLOCK, b"\0"),
        )
        return offset

    def finish(self) -> str:
        """End the tar and flush it to disk; returns its BLAKE3."""
        self._write(bytes(2 * BLOCK))
        os.fsync(self._file)
        return self._digest.hexdigest()

    def _write(self, *parts: bytes) -> None:
        for part in parts:
            self._digest.update(part)
        num_bytes = sum(map(len, parts))
        written = os.writev(self._file, parts)
        if written < num_bytes:
            # A nearly full disk takes a part of it; the next write tells why.
            rest = b"".join(parts)[written:]
            while rest:
                count = os.write(self._file, rest)
                if count == 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                rest = rest[count:]
        self.num_bytes += num_bytes
        if self.num_bytes - self._flushed > FLUSH_BYTES:
            # Let the disk begin, so that little is left to wait for at the end.
            os.posix_fadvise(
                self._file, self._flushed, self.num_bytes - self._flushed, os.POSIX_FADV_DONTNEED
            )
            self._flushed = self.num_bytes
