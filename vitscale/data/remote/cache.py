"""Cache whole shards on a local disk, shared by all processes of a machine.

Owns: the files of the cache folder and their total size. A shard is in it whole and verified, or
not at all.
Leaves out: requests (`store`), and which shards to fetch (`shards`).

A file is named by its BLAKE3, so several sets and jobs can share a folder, and no name from a
manifest becomes a path. `HASH.part` is being fetched; the fetching process holds its lock, which
the kernel releases however the process ends. It has its full length from the start, to reserve the
space. The modification time of a file is its last use.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import blake3

from vitscale.config.errors import UserError
from vitscale.data.remote.store import DamagedError
from vitscale.distributed.atomic_files import blake3_of_file, fsync_folder

CHUNK_BYTES = 8 << 20
# Shards used this recently are not evicted; otherwise two jobs could evict each other's shards in
# turn.
IDLE_S = 10.0
# Resolution of the last use.
TOUCH_S = 1.0

_NAME = re.compile(r"[0-9a-f]{64}")
# Other files in the folder are neither counted nor touched.
_OURS = re.compile(r"[0-9a-f]{64}(?P<part>\.part)?")


class CacheFullError(OSError):
    """All files in the cache are in use, or the new file is larger than the cache."""


class ShardCache:
    """Holds at most `max_bytes`; evicts the least recently used file first."""

    def __init__(self, folder: Path, *, max_bytes: int, idle_s: float = IDLE_S) -> None:
        self.folder, self.max_bytes, self.idle_s = folder, max_bytes, idle_s

    def prepare(self) -> None:
        """Create the folder. Raises UserError if it cannot be written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._lock():
                pass
        except OSError as error:
            raise UserError(
                f"{str(self.folder)!r} cannot be written ({error.strerror or error})",
                where="data.remote.cache_path",
                next_step="choose a folder on a local disk with free space, or null for no cache",
            ) from None

    def path(self, blake3_hex: str) -> Path:
        """Path of a shard, present or not."""
        assert _NAME.fullmatch(blake3_hex), blake3_hex
        return self.folder / blake3_hex

    def holds(self, blake3_hex: str) -> bool:
        return os.path.exists(self.path(blake3_hex))  # False also if the disk fails

    def read(self, blake3_hex: str, *, offset: int, num_bytes: int) -> bytes | None:
        """Bytes of one range; None if the shard is missing or too short."""
        # Opened for each read: an open file would occupy the disk after its eviction.
        try:
            file = os.open(self.path(blake3_hex), os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            if time.time() - os.fstat(file).st_mtime > TOUCH_S:
                os.utime(file)
            data = os.pread(file, num_bytes, offset)
        finally:
            os.close(file)
        return data if len(data) == num_bytes else None

    def verify(self, blake3_hex: str) -> None:
        """Hash a whole file, which counts as use. Removes a wrong one and raises DamagedError."""
        path = self.path(blake3_hex)
        try:
            os.utime(path)
            is_valid = blake3_of_file(path) == blake3_hex
            os.utime(path)  # again: hashing a large index can take longer than idle_s
        except OSError:  # a bad block, or just evicted
            is_valid = False
        if not is_valid:
            self.forget(blake3_hex)
            raise DamagedError(f"{path} does not have the hash in its name")

    def forget(self, blake3_hex: str) -> None:
        """Remove a damaged shard."""
        self.path(blake3_hex).unlink(missing_ok=True)

    def fetch(
        self,
        blake3_hex: str,
        *,
        num_bytes: int,
        read: Callable[[int, int], bytes],
        wait: bool = False,
    ) -> bool:
        """Fetch a shard into the cache, once for all processes.

        read: (offset, number of bytes) -> bytes. wait: if another process is fetching it.
        Returns whether the shard is present; False: another process is fetching it. Raises
        DamagedError if the bytes have the wrong hash, CacheFullError, and what `read` and the disk
        raise.
        """
        final, partial = self.path(blake3_hex), self.folder / f"{blake3_hex}.part"
        while not final.exists():
            with _locked(partial, wait=wait) as file:
                if file is None:
                    return False
                if not _is_file_at(file, partial):
                    continue  # the other process has just finished or failed
                if final.exists():  # finished since it was checked; this file is a new one
                    partial.unlink()
                    continue
                try:
                    self._reserve(file, num_bytes=num_bytes)
                    _copy(read, file, num_bytes=num_bytes, blake3_hex=blake3_hex)
                    with self._lock():  # or a process that counts the files would miss this one
                        os.rename(partial, final)
                except BaseException:
                    partial.unlink(missing_ok=True)
                    raise
            fsync_folder(self.folder)
        return True

    def _reserve(self, file: int, *, num_bytes: int) -> None:
        """Extend a file to its full length, after evicting as many others as necessary."""
        with self._lock():
            os.ftruncate(file, 0)
            used, idle = 0, []
            for entry in list(os.scandir(self.folder)):
                ours = _OURS.fullmatch(entry.name)
                if not ours:
                    continue
                with suppress(FileNotFoundError):  # just renamed or evicted
                    stat = entry.stat()
                    if ours["part"] and _removed_as_abandoned(entry.path):
                        continue
                    used += stat.st_size
                    if not ours["part"]:
                        idle.append((stat.st_mtime, stat.st_size, entry.path))
            leaving = []
            for last_use, size, path in sorted(idle):
                if used + num_bytes <= self.max_bytes or time.time() - last_use < self.idle_s:
                    break
                leaving.append(path)
                used -= size
            if used + num_bytes > self.max_bytes:
                raise CacheFullError(f"{self.folder} has no space for {num_bytes} bytes")
            for path in leaving:
                os.unlink(path)
            os.ftruncate(file, num_bytes)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Lock for reserving space."""
        with _locked(self.folder / "lock", wait=True) as file:
            assert file is not None
            yield


def _copy(read: Callable[[int, int], bytes], file: int, *, num_bytes: int, blake3_hex: str) -> None:
    digest = blake3.blake3()
    for offset in range(0, num_bytes, CHUNK_BYTES):
        data = read(offset, min(CHUNK_BYTES, num_bytes - offset))
        digest.update(data)
        while data:
            written = os.pwrite(file, data, offset)
            data, offset = data[written:], offset + written
    if digest.hexdigest() != blake3_hex:
        raise DamagedError(f"{num_bytes} bytes do not have the hash of the manifest ({blake3_hex})")
    os.fsync(file)


@contextmanager
def _locked(path: Path, *, wait: bool) -> Iterator[int | None]:
    """Open and lock a file; yields None if another process has the lock and `wait` is false."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield None
            return
        try:
            yield file
        finally:
            # Closing is not enough: a process forked since then may have it open, too.
            fcntl.flock(file, fcntl.LOCK_UN)
    finally:
        os.close(file)


def _is_file_at(file: int, path: Path) -> bool:
    """Whether a path still names this open file."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file), os.stat(path))
    return False


def _removed_as_abandoned(path: str) -> bool:
    """Remove a file that no process has locked; we hold our own through another descriptor."""
    file = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)  # before another process can lock it
    except BlockingIOError:
        return False
    finally:
        os.close(file)
    return True
