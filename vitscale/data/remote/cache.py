"""A folder of whole shards on a local disk, shared by everything that reads them on a machine.

Owns: what lies in the folder, its size, and that a shard is there whole and verified or not at all.
Leaves out: where shards come from (`remote_store`) and which are wanted (`remote_shards`).

A file is named by the BLAKE3 of its content, so sets of shards and jobs can share one folder, and
no name of somebody else's becomes a path. `HASH.part` is a shard on its way, locked by the process
that fetches it; it has its full length from the start, so that the room is taken. The kernel drops
the lock with the process, however that ends. The file's time is when it was last used.
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
from vitscale.data.remote.store import Damaged
from vitscale.distributed.atomic_files import blake3_of_file, fsync_folder

CHUNK_BYTES = 8 << 20
# What was used so recently is being used; without this, two jobs would take turns in evicting each
# other's shards.
IDLE_S = 10.0
# How precisely the last use is noted.
TOUCH_S = 1.0

_NAME = re.compile(r"[0-9a-f]{64}")
# Whatever else lies in the folder is somebody's: neither counted nor touched.
_OURS = re.compile(r"[0-9a-f]{64}(?P<part>\.part)?")


class NoRoom(OSError):
    """Everything in the cache is in use, or the file is larger than the cache."""


class ShardCache:
    """Never more than `max_bytes`; what was used longest ago leaves first."""

    def __init__(self, folder: Path, *, max_bytes: int, idle_s: float = IDLE_S) -> None:
        self.folder, self.max_bytes, self.idle_s = folder, max_bytes, idle_s

    def prepare(self) -> None:
        """Make the folder. Raises UserError when it cannot be written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._lock():
                pass
        except OSError as error:
            raise UserError(
                f"{str(self.folder)!r} cannot be written ({error.strerror or error})",
                where="data.remote.cache_path",
                next_step="choose a folder on a local disk with room, or null for no cache",
            ) from None

    def path(self, content: str) -> Path:
        """Where a shard lies, or would."""
        assert _NAME.fullmatch(content), content
        return self.folder / content

    def holds(self, content: str) -> bool:
        return os.path.exists(self.path(content))  # False where the disk fails

    def read(self, content: str, *, offset: int, num_bytes: int) -> bytes | None:
        """Bytes of one range; None when the shard is not here (or no longer whole)."""
        # Opened each time: an open file would keep its room on the disk after it was evicted.
        try:
            file = os.open(self.path(content), os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            if time.time() - os.fstat(file).st_mtime > TOUCH_S:
                os.utime(file)
            data = os.pread(file, num_bytes, offset)
        finally:
            os.close(file)
        return data if len(data) == num_bytes else None

    def verify(self, content: str) -> None:
        """Hash a whole file, which counts as use. Raises Damaged after removing a wrong one."""
        path = self.path(content)
        try:
            os.utime(path)
            is_right = blake3_of_file(path) == content
            os.utime(path)  # hashing the index of a large corpus takes longer than a use counts
        except OSError:  # a bad block, or evicted by now
            is_right = False
        if not is_right:
            self.forget(content)
            raise Damaged(f"{path} does not hold the bytes of its name")

    def forget(self, content: str) -> None:
        """Remove a shard that turned out to be damaged."""
        self.path(content).unlink(missing_ok=True)

    def fetch(
        self,
        content: str,
        *,
        num_bytes: int,
        read: Callable[[int, int], bytes],
        wait: bool = False,
    ) -> bool:
        """Bring a shard here, once for all processes.

        read: (offset, number of bytes) -> bytes. wait: for a process that fetches it already.
        Returns whether it is here now: False when another process is at it. Raises Damaged when
        the bytes do not have the hash, NoRoom, and what `read` and the disk raise.
        """
        final, partial = self.path(content), self.folder / f"{content}.part"
        while not final.exists():
            with _locked(partial, wait=wait) as file:
                if file is None:
                    return False
                if not _is_at(file, partial):
                    continue  # the other one has just finished, or given up
                try:
                    self._take_room(file, num_bytes=num_bytes)
                    _copy(read, file, num_bytes=num_bytes, content=content)
                    os.rename(partial, final)
                except BaseException:
                    partial.unlink(missing_ok=True)
                    raise
            fsync_folder(self.folder)
        return True

    def _take_room(self, file: int, *, num_bytes: int) -> None:
        """Give a file its full length, after removing as many others as that takes."""
        with self._lock():
            os.ftruncate(file, 0)
            used, idle = 0, []
            for entry in list(os.scandir(self.folder)):
                ours = _OURS.fullmatch(entry.name)
                if not ours:
                    continue
                with suppress(FileNotFoundError):  # renamed or evicted by now
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
                raise NoRoom(f"no room for {num_bytes} bytes in {self.folder}")
            for path in leaving:
                os.unlink(path)
            os.ftruncate(file, num_bytes)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """For decisions about room."""
        with _locked(self.folder / "lock", wait=True) as file:
            assert file is not None
            yield


def _copy(read: Callable[[int, int], bytes], file: int, *, num_bytes: int, content: str) -> None:
    digest = blake3.blake3()
    for offset in range(0, num_bytes, CHUNK_BYTES):
        data = read(offset, min(CHUNK_BYTES, num_bytes - offset))
        digest.update(data)
        while data:
            written = os.pwrite(file, data, offset)
            data, offset = data[written:], offset + written
    if digest.hexdigest() != content:
        raise Damaged(f"{num_bytes} bytes that are not those of the manifest (BLAKE3 {content})")
    os.fsync(file)


@contextmanager
def _locked(path: Path, *, wait: bool) -> Iterator[int | None]:
    """An open file that no other process has locked; None when one has, unless `wait`."""
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
            # Closing is not enough where a process forked meanwhile has it open, too.
            fcntl.flock(file, fcntl.LOCK_UN)
    finally:
        os.close(file)


def _is_at(file: int, path: Path) -> bool:
    """Whether an open file still is the one of that name."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file), os.stat(path))
    return False


def _removed_as_abandoned(path: str) -> bool:
    """Remove a file of which no process holds the lock; our own is held by another descriptor."""
    file = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)  # before anybody else can lock it
    except BlockingIOError:
        return False
    finally:
        os.close(file)
    return True
