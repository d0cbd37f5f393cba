"""Write a file sequentially, bypassing the page cache where possible.

Owns: the buffers, the thread that writes one while the other is filled, flushing to disk.
Leaves out: what is written (`tar_writer`).

Writing through the page cache copies the bytes there and flushes them later: for a photograph of
110 kB that takes as long as reading it from the cache and hashing it. A shard is not read again
soon, so it is written directly from our buffers (O_DIRECT). Where the file system (tmpfs, some
network ones) or the operating system does not support that, it is written as usual.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

# O_DIRECT needs offsets, lengths and memory aligned to blocks: the largest block size in use.
ALIGNMENT = 4096
BUFFER_BYTES = 8 << 20
HUGE_PAGE = 2 << 20
FLUSH_BYTES = 16 << 20
O_DIRECT = getattr(os, "O_DIRECT", 0)

Observer = Callable[[memoryview], object]


class BlockFile:
    """A file with two buffers: one is filled while a thread writes the other."""

    def __init__(self, path: Path, *, observe: Observer) -> None:
        """observe: called with all bytes in order, in large pieces, before they are written."""
        self._file = _open(path)
        self._observe = observe
        self._buffers = [_buffer(), _buffer()]
        self._filled = self._observed = 0
        self._written = self._flushed = 0
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None

    @property
    def num_bytes(self) -> int:
        return self._written + self._filled

    def reserve(self, num_bytes: int) -> memoryview:
        """Memory for the next `num_bytes` of the file; `advance` takes them over."""
        assert num_bytes <= BUFFER_BYTES
        if self._filled + num_bytes > BUFFER_BYTES + ALIGNMENT:
            self._swap_buffers()
        return self._buffers[0][self._filled : self._filled + num_bytes]

    def advance(self, num_bytes: int) -> None:
        self._filled += num_bytes

    def append(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        for start in range(0, len(view), BUFFER_BYTES):
            part = view[start : start + BUFFER_BYTES]
            self.reserve(len(part))[:] = part
            self.advance(len(part))

    def finish(self) -> None:
        """Write the rest and flush everything to disk."""
        self._wait()
        end = self._filled + -self._filled % ALIGNMENT
        self._buffers[0][self._filled : end] = bytes(end - self._filled)
        self._observe_to(self._filled)
        length = self.num_bytes
        self._write(self._buffers[0][:end])
        if end != self._filled:
            os.ftruncate(self._file, length)
        self._written, self._filled = length, 0
        os.fsync(self._file)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        os.close(self._file)

    def _observe_to(self, end: int) -> None:
        self._observe(self._buffers[0][self._observed : end])
        self._observed = end

    def _swap_buffers(self) -> None:
        """Write all whole blocks in the thread, and fill the other buffer from now on."""
        self._observe_to(self._filled)
        self._wait()
        whole = self._filled - self._filled % ALIGNMENT
        full, other = self._buffers
        rest = self._filled - whole
        other[:rest] = full[whole : self._filled]
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1)
        self._pending = self._thread.submit(self._write, full[:whole])
        self._buffers = [other, full]
        self._written += whole
        self._filled = self._observed = rest

    def _wait(self) -> None:
        """Wait until the other buffer is written. Raises the error of the thread."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def _write(self, data: memoryview) -> None:
        while data:
            try:
                count = os.write(self._file, data)
            except OSError as error:
                if error.errno != errno.EINVAL or not _disable_direct(self._file):
                    raise
                continue
            if count == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if count % ALIGNMENT and count < len(data):
                # A nearly full disk writes a part; the next write raises the error.
                _disable_direct(self._file)
            data = data[count:]
            self._flushed = _begin_flush(self._file, self._flushed)


def _buffer() -> memoryview:
    """A page-aligned buffer, with space for the rest of a block before a full load."""
    memory = mmap.mmap(-1, BUFFER_BYTES + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        # Passing 4 huge pages to the disk takes a quarter of the time of 2,048 small ones.
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def _open(path: Path) -> int:
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    try:
        return os.open(path, flags | O_DIRECT, 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # The file may have been created before its flags were refused.
    path.unlink(missing_ok=True)
    return os.open(path, flags, 0o644)


def _disable_direct(file: int) -> bool:
    """Write through the page cache from now on; False if that was already so."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    if not flags & O_DIRECT:
        return False
    fcntl.fcntl(file, fcntl.F_SETFL, flags & ~O_DIRECT)
    return True


def _begin_flush(file: int, flushed: int) -> int:
    """Start writing cached pages to disk, so that little is left for the final flush."""
    end = os.lseek(file, 0, os.SEEK_CUR)
    if end - flushed < FLUSH_BYTES:
        return flushed
    os.posix_fadvise(file, flushed, end - flushed, os.POSIX_FADV_DONTNEED)
    return end
