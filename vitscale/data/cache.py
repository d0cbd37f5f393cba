"""Fetch whole shards at a URL to a local disk, shared by all processes of a machine.

Owns: the files of the cache folder and their total size. A file is in it whole and verified, or
not at all.
Leaves out: requests (`storage`), the order in which shards are read (`order`).

A file is named by its BLAKE3, so several sets and jobs can share a folder, and no name from a
manifest becomes a path. `HASH.part` is being fetched; the fetching process holds its lock, which
the kernel releases however the process ends. It has its full length from the start, to reserve the
space. The modification time of a file is its last use.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import blake3

from vitscale.config.errors import UserError
from vitscale.data.settings import RemoteSettings
from vitscale.data.storage import Url, read_range
from vitscale.distributed.atomic_files import blake3_of_file

CHUNK_BYTES = 8 << 20
# Bytes that are wrong this often are damaged: where they are stored, or in their index.
DAMAGED_READS = 3
# A prefetch evicts no shard that was used this recently: it may be one of the current block.
IDLE_S = 60.0
# Resolution of the last use.
TOUCH_S = 1.0
# Other files in the folder are neither counted nor touched.
_OURS = re.compile(r"[0-9a-f]{64}(?P<part>\.part)?")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file at a URL, with the size and hash that a manifest gives."""

    url: Url
    num_bytes: int
    blake3_hex: str


class ShardCache:
    """Holds at most `max_bytes`; evicts the least recently used file first."""

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes

    def path(self, file: RemoteFile) -> Path:
        """Local path of a file, which is fetched if it is missing; once for all processes.

        Raises UserError if the storage gives no answer or wrong bytes, or the disk is full.
        """
        try:
            return self.fetch(file)
        except OSError as error:
            raise UserError(
                f"{file.url} cannot be kept there ({error.strerror or error})",
                where=str(self.folder),
                next_step="free space, raise data.remote.cache_gib, or choose another disk with "
                "data.remote.cache_path",
            ) from None

    def fetch(self, file: RemoteFile, *, wait: bool = True, idle_s: float = 0.0) -> Path:
        """Like `path`, but raises OSError if the disk is full.

        wait: if another process is fetching it; False: BlockingIOError then. idle_s: evict only
        files that were not used for so long.
        """
        assert _OURS.fullmatch(file.blake3_hex), file.blake3_hex
        final = self.folder / file.blake3_hex
        partial = self.folder / f"{file.blake3_hex}.part"
        while not final.exists():
            with _locked(partial, wait=wait) as descriptor:
                if not _is_file_at(descriptor, partial):
                    continue  # another process has just finished or failed
                try:
                    if final.exists():  # finished since it was checked; this file is a new one
                        partial.unlink()
                        break
                    self._reserve(descriptor, num_bytes=file.num_bytes, idle_s=idle_s)
                    _copy(file, descriptor)
                    with self._lock():  # or a process that counts the files would miss this one
                        os.rename(partial, final)
                except BaseException:
                    partial.unlink(missing_ok=True)
                    raise
        return final

    def verified(self, file: RemoteFile) -> Path:
        """Like `path`; a file that was there already is hashed, and fetched again if damaged."""
        path = self.path(file)
        if blake3_of_file(path) != file.blake3_hex:
            path.unlink(missing_ok=True)
            path = self.path(file)
        return path

    def read(self, file: RemoteFile, *, offset: int, num_bytes: int, hash_prefix: int) -> bytes:
        """Bytes of one range; fetched again if those on the local disk are damaged.

        hash_prefix: first 8 bytes of their BLAKE3. Raises OSError if they are damaged where they
        are stored, and what `path` raises.
        """
        for _ in range(DAMAGED_READS):
            path = self.path(file)
            try:
                data = _read(path, offset=offset, num_bytes=num_bytes)
            except FileNotFoundError:  # just evicted
                continue
            except OSError:  # a bad block
                data = b""
            if prefix_of_hash(data) == hash_prefix:
                return data
            path.unlink(missing_ok=True)
        raise OSError("its bytes do not have the hash in the index")

    def prefetch(self, files: Sequence[RemoteFile]) -> None:
        """Fetch files in the background, the first first; replaces what was asked for before."""
        global _is_fetching
        missing = [file for file in files if not (self.folder / file.blake3_hex).exists()]
        with _changing:
            _wanted[:] = [(self, file) for file in missing]
            if _wanted and not _is_fetching:
                _is_fetching = True
                # A daemon, so that the end does not wait for the network.
                threading.Thread(target=_fetch_wanted, daemon=True).start()

    def _reserve(self, descriptor: int, *, num_bytes: int, idle_s: float) -> None:
        """Extend a file to its full length, after evicting as many others as necessary."""
        with self._lock():
            os.ftruncate(descriptor, 0)
            used, complete = 0, []
            for entry in list(os.scandir(self.folder)):
                ours = _OURS.fullmatch(entry.name)
                if not ours or (ours["part"] and _removed_as_abandoned(entry.path)):
                    continue
                with suppress(FileNotFoundError):  # just removed as damaged
                    stat = entry.stat()
                    used += stat.st_size
                    if not ours["part"]:
                        complete.append((stat.st_mtime, stat.st_size, entry.path))
            leaving = []
            for last_use, size, path in sorted(complete):
                if used + num_bytes <= self.max_bytes or time.time() - last_use < idle_s:
                    break
                leaving.append(path)
                used -= size
            if used + num_bytes > self.max_bytes:
                raise OSError(errno.ENOSPC, f"no space for {num_bytes} bytes")
            for path in leaving:
                Path(path).unlink(missing_ok=True)
            os.ftruncate(descriptor, num_bytes)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Lock for reserving space."""
        with _locked(self.folder / "lock", wait=True):
            yield


def open_cache(settings: RemoteSettings) -> ShardCache:
    """Raises UserError if no folder is set, or it cannot be written."""
    if settings.cache_path is None:
        raise UserError(
            "shards at a URL are fetched to a local disk first",
            where="remote.cache_path",
            next_step="set data.remote.cache_path (predict, visualize: remote.cache_path) to a "
            "folder on a disk of each node",
        )
    folder = Path(settings.cache_path).expanduser().absolute()
    made = ShardCache(folder, max_bytes=int(settings.cache_gib * 2**30))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with made._lock():
            pass
    except OSError as error:
        raise UserError(
            f"{str(folder)!r} cannot be written ({error.strerror or error})",
            where="data.remote.cache_path",
            next_step="choose a writable folder on a local disk with free space",
        ) from None
    return made


def prefix_of_hash(data: bytes) -> int:
    """The first 8 bytes of the BLAKE3 of `data`, little-endian."""
    return int.from_bytes(blake3.blake3(data).digest(8), "little")


# Files to prefetch, and whether a thread is at it; both are changed under the lock. Workers are
# forks of a server that never prefetches.
_wanted: list[tuple[ShardCache, RemoteFile]] = []
_is_fetching = False
_changing = threading.Lock()


def _fetch_wanted() -> None:
    """Fetch until nothing is wanted."""
    global _is_fetching
    while True:
        with _changing:
            if not _wanted:
                _is_fetching = False
                return
            cache, file = _wanted.pop(0)
        # Another process fetches it, all shards are in use, or the storage gives no answer:
        # whoever reads the shard fetches it, and names what is wrong.
        with suppress(OSError, UserError):
            cache.fetch(file, wait=False, idle_s=IDLE_S)


def _copy(file: RemoteFile, descriptor: int) -> None:
    """Write the bytes of a remote file. Raises UserError if their hash is wrong."""
    for _ in range(DAMAGED_READS):
        digest = blake3.blake3()
        os.lseek(descriptor, 0, os.SEEK_SET)
        for offset in range(0, file.num_bytes, CHUNK_BYTES):
            num_bytes = min(CHUNK_BYTES, file.num_bytes - offset)
            data = read_range(file.url, offset=offset, num_bytes=num_bytes)
            digest.update(data)
            while data:
                data = data[os.write(descriptor, data) :]
        if digest.hexdigest() == file.blake3_hex:
            return
    raise UserError(
        "cannot be read: its bytes do not have the hash of the manifest",
        where=str(file.url),
        next_step="upload it again; make the shards again if the local copy is damaged too",
    )


def _read(path: Path, *, offset: int, num_bytes: int) -> bytes:
    with open(path, "rb", buffering=0) as file:
        if time.time() - os.fstat(file.fileno()).st_mtime > TOUCH_S:
            os.utime(file.fileno())
        return os.pread(file.fileno(), num_bytes, offset)


@contextmanager
def _locked(path: Path, *, wait: bool) -> Iterator[int]:
    """Open and lock a file. Raises BlockingIOError if another process has the lock."""
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        try:
            yield file.fileno()
        finally:
            # Closing is not enough: a process forked since then may have it open, too.
            fcntl.flock(file, fcntl.LOCK_UN)


def _is_file_at(descriptor: int, path: Path) -> bool:
    """Whether a path still names this open file."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    return False


def _removed_as_abandoned(path: str) -> bool:
    """Remove a file that no process has locked; we hold our own through another descriptor."""
    with suppress(OSError), open(path, "rb") as file:  # fetched, or just removed
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)  # before another process can lock it
        return True
    return False
