"""Write tars with deterministic bytes.

Owns: the tar layout of one shard.
Leaves out: which samples, in what order, and the index (`data_prep`).

webdataset's TarWriter could be made deterministic, but does not return the offset of a member's
content, which the index needs. Headers are made from a template: those of the standard library take
43 microseconds each, a third of the time of copying a photograph.
"""

from __future__ import annotations

import os
import tarfile
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import blake3

from vitscale.data.tar_members import BLOCK, END_MARK

MAX_MEMBER_BYTES = 8**11
# The disk gets this many bytes at a time while the next ones are made.
SYNC_BYTES = 32 << 20
# Two headers, one block for the label, half a block of padding on average.
SAMPLE_OVERHEAD = 3 * BLOCK + BLOCK // 2
# A header has a name of 100 bytes, owner and mode, 12 bytes for the size, the time, 8 bytes for the
# sum of its bytes, in which these count as spaces, and more.
TEMPLATE = tarfile.TarInfo("").tobuf(tarfile.USTAR_FORMAT)
NAME_BYTES = 100
OWNER = TEMPLATE[NAME_BYTES:124]
TIME = TEMPLATE[136:148]
MORE = TEMPLATE[156:]
SUM_OF_MORE = sum(MORE) + sum(b" " * 8)


def ustar_header(name: str, num_bytes: int) -> bytes:
    """The 512 bytes before a member, as `tarfile.TarInfo(name).tobuf(USTAR_FORMAT)` makes them."""
    raw = name.encode("ascii")
    assert 0 < len(raw) <= NAME_BYTES and 0 <= num_bytes < MAX_MEMBER_BYTES
    start = raw.ljust(NAME_BYTES, b"\0") + OWNER + b"%011o\0" % num_bytes + TIME
    return start + b"%06o\0 " % (sum(start) + SUM_OF_MORE) + MORE


def around_image(
    key: str, *, extension: str, num_bytes: int, label: int | None
) -> tuple[bytes, bytes]:
    """The bytes of a sample before and after those of its image."""
    # A member is padded to whole blocks of 512 bytes.
    after = bytes(-num_bytes % BLOCK)
    if label is not None:
        text = str(label).encode()
        after += ustar_header(f"{key}.cls", len(text)) + text.ljust(BLOCK, b"\0")
    return ustar_header(f"{key}.{extension}", num_bytes), after


class TarShard:
    """Writes one tar to an unfinished file, which is whole after `finish`."""

    def __init__(self, path: Path) -> None:
        self._digest = blake3.blake3()
        self._file = open(path, "xb")
        self.num_bytes = 0
        self._disk = ThreadPoolExecutor(max_workers=1)
        self._syncs: list[Future[None]] = []

    def __enter__(self) -> TarShard:
        return self

    def __exit__(self, *_: object) -> None:
        self._disk.shutdown()
        with suppress(OSError):  # of what is left in the buffer after an error
            self._file.close()

    def add(self, key: str, *, extension: str, image: bytes, label: int | None) -> int:
        """Append `key.extension` and `key.cls`; returns the image's byte offset in the tar.

        label: None: no `key.cls`.
        """
        before, after = around_image(
            key, extension=extension, num_bytes=len(image), label=label
        )
        offset = self.num_bytes + len(before)
        self._append(
            b"".join((before, image, after))
        )  # one call takes less time than three
        return offset

    def _append(self, data: bytes) -> None:
        self._digest.update(data)
        self._file.write(data)
        self.num_bytes += len(data)

        # Otherwise a whole shard would wait for the disk at its end.
        if self.num_bytes > SYNC_BYTES * (len(self._syncs) + 1):
            self._syncs.append(self._disk.submit(os.fdatasync, self._file.fileno()))

    def finish(self) -> str:
        """End the tar; returns its BLAKE3. Raises OSError if the disk did not take all of it."""
        self._append(END_MARK)
        self._file.flush()
        # The system reports an error of the disk only once: a later fsync would succeed.
        for sync in self._syncs:
            sync.result()
        return self._digest.hexdigest()
