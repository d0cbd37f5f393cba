"""Read byte ranges of shards: of local ones, and of those at a URL through a cache of whole files.

Owns: open files; which errors mean lost data; the files of the cache folder and their total size.
A file is in the cache whole and verified, or not at all.
Leaves out: the ranges of samples (`index`), requests (`storage`), the order of reading (`order`).

A cached file is named by its BLAKE3, so several sets and jobs can share a folder, and no name from
a manifest becomes a path. `HASH.part` is being fetched by the process that locks `HA.lock`, a lock
that the kernel releases however the process ends. It has its full length from the start, to reserve
the space. The modification time of a file is its last use.
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
from functools import lru_cache
from io import BufferedWriter, FileIO
from pathlib import Path

import blake3

from vitscale.config.errors import UserError, not_written
from vitscale.data.settings import RemoteSettings
from vitscale.data.storage import Location, Url, read_chunks
from vitscale.distributed.atomic_files import blake3_of_file

MAX_OPEN_SHARDS = 64
# Data are lost: a bad block, or a checksum or structure that the file system finds broken. Other
# errors (stale handle, no memory, too many open files, ...) are transient.
DATA_LOSS_ERRNOS = (errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.ENODATA)
# Bytes that are wrong this often are damaged: where they are stored, or in their index.
DAMAGED_READS = 3
# A prefetch evicts no shard that was used this recently: it may be one of the current block.
IDLE_S = 60.0
# A part that grew no more for this long has no process that fetches it.
ABANDONED_S = 600.0
# Resolution of the last use.
TOUCH_S = 1.0
# Other files in the folder are neither counted nor touched.
_OURS = re.compile(r"[0-9a-f]{64}(?P<part>\.part)?")


def read_shard(path: Path, *, offset: int, num_bytes: int) -> bytes:
    """Bytes of one range. Raises OSError if they are lost or the file is too short, UserError if
    the file cannot be accessed."""
    try:
        data = os.pread(_opened(path).fileno(), num_bytes, offset)
    except OSError as error:
        if error.errno in DATA_LOSS_ERRNOS:
            raise
        raise UserError(
            f"cannot be read ({error.strerror})",
            where=str(path),
            next_step="check the storage and the limits of this machine (ulimit -n, memory), then "
            "run the same command again",
        ) from None
    if len(data) < num_bytes:
        raise OSError(f"ends after {offset + len(data)} bytes")
    return data


@lru_cache(maxsize=MAX_OPEN_SHARDS)
def _opened(path: Path) -> FileIO:
    """A file is closed when the cache forgets it."""
    return open(path, "rb", buffering=0)


def prefix_of_hash(data: bytes) -> int:
    """The first 8 bytes of the BLAKE3 of `data`, little-endian."""
    return int.from_bytes(blake3.blake3(data).digest(8), "little")


# ---- shards at a URL -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file at a URL, with the size and hash that a manifest gives, and the cache that keeps it.

    Its methods raise UserError if the storage gives no answer or wrong bytes, or the disk is full.
    """

    url: Url
    num_bytes: int
    blake3_hex: str
    cache: ShardCache

    def __str__(self) -> str:
        return self.url.text

    def path(self, *, ahead: bool = False) -> Path:
        """Local path; the file is fetched if it is missing, once for all processes.

        ahead: evict nothing in use, and raise UserError if another process is fetching it.
        """
        assert _OURS.fullmatch(self.blake3_hex), self.blake3_hex
        final = self.cache.folder / self.blake3_hex
        if final.exists():
            return final
        try:
            with self.cache.locked(self.blake3_hex[:2], wait=not ahead):
                if not final.exists():  # not fetched meanwhile
                    self._fetch(final, idle_s=IDLE_S if ahead else 0.0)
        except OSError as error:
            raise UserError(
                f"{self.url} cannot be kept there ({error.strerror or error})",
                where=str(self.cache.folder),
                next_step="free space, raise data.remote.cache_gib, or choose another disk with "
                "data.remote.cache_path",
            ) from None
        return final

    def verified(self) -> Path:
        """Like `path`; a file that was there already is hashed, and fetched again if damaged."""
        path = self.path()
        if blake3_of_file(path) != self.blake3_hex:
            path.unlink(missing_ok=True)
            path = self.path()
        return path

    def read(self, *, offset: int, num_bytes: int, hash_prefix: int) -> bytes:
        """Bytes of one range; fetched again if those on the local disk are damaged.

        hash_prefix: first 8 bytes of their BLAKE3. Raises OSError if they are damaged where they
        are stored.
        """
        for _ in range(DAMAGED_READS):
            path, data = self.path(), b""
            with suppress(OSError), open(path, "rb", buffering=0) as file:  # bad block, or evicted
                if time.time() - os.fstat(file.fileno()).st_mtime > TOUCH_S:
                    os.utime(file.fileno())
                data = os.pread(file.fileno(), num_bytes, offset)
            if prefix_of_hash(data) == hash_prefix:
                return data
            path.unlink(missing_ok=True)
        raise OSError("its bytes do not have the hash in the index")

    def _fetch(self, final: Path, *, idle_s: float) -> None:
        partial = final.with_suffix(".part")
        try:
            with open(partial, "wb") as out:
                self.cache.reserve(out, num_bytes=self.num_bytes, idle_s=idle_s)
                self._copy(out)
            with self.cache.locked("space"):  # a process that counts the files would miss this one
                os.rename(partial, final)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def _copy(self, out: BufferedWriter) -> None:
        for _ in range(DAMAGED_READS):
            digest = blake3.blake3()
            out.seek(0)
            for data in read_chunks(self.url, self.num_bytes):
                digest.update(data)
                out.write(data)
            if digest.hexdigest() == self.blake3_hex:
                return
        raise UserError(
            "cannot be read: its bytes do not have the hash of the manifest",
            where=str(self.url),
            next_step="upload it again; make the shards again if the local copy is damaged too",
        )


@dataclass(frozen=True, slots=True)
class ShardCache:
    """Holds at most `max_bytes`; evicts the least recently used file first."""

    folder: Path
    max_bytes: int

    def reserve(self, out: BufferedWriter, *, num_bytes: int, idle_s: float) -> None:
        """Extend a file to its full length, after evicting as many others as necessary.

        idle_s: how long those have not been used. Raises OSError if there is no space.
        """
        with self.locked("space"):
            used, evictable, now = 0, [], time.time()
            for entry in list(os.scandir(self.folder)):
                ours = _OURS.fullmatch(entry.name)
                if ours:
                    with suppress(FileNotFoundError):  # just removed as damaged
                        stat = entry.stat()
                        used += stat.st_size
                        if now - stat.st_mtime >= (ABANDONED_S if ours["part"] else idle_s):
                            evictable.append((stat.st_mtime, stat.st_size, entry.path))
            evictable.sort(reverse=True)
            excess = used + num_bytes - self.max_bytes
            if excess > sum(size for _, size, _ in evictable):
                raise OSError(errno.ENOSPC, f"no space for {num_bytes} bytes")
            while excess > 0:
                _, size, path = evictable.pop()
                excess -= size
                Path(path).unlink(missing_ok=True)
            out.truncate(num_bytes)

    @contextmanager
    def locked(self, name: str, *, wait: bool = True) -> Iterator[None]:
        """Lock `space`, or the files whose hash begins with `name`; a lock each would be many.

        Raises BlockingIOError if another process has the lock.
        """
        with open(self.folder / f"{name}.lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            try:
                yield
            finally:
                # Closing is not enough: a process forked since then may have it open, too.
                fcntl.flock(file, fcntl.LOCK_UN)


def local_or_remote(
    files: Sequence[tuple[Location, int, str]], settings: RemoteSettings
) -> list[Path | RemoteFile]:
    """Paths as they are; URLs with size, BLAKE3 and the cache, which one needs.

    Raises UserError if no folder for it is set, or it cannot be written.
    """
    cache: ShardCache | None = None
    found: list[Path | RemoteFile] = []
    for place, num_bytes, blake3_hex in files:
        if isinstance(place, Url):
            cache = cache or open_cache(settings)
            found.append(RemoteFile(place, num_bytes, blake3_hex, cache))
        else:
            found.append(place)
    return found


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
        with made.locked("space"):
            return made
    except OSError as error:
        raise not_written(error, key="data.remote.cache_path", path=str(folder)) from None


# The thread that prefetches. Workers are forks of a server that never does.
_prefetching = threading.Thread()


def prefetch(shards: Sequence[Path | RemoteFile]) -> None:
    """Fetch shards in the background, the first first; does nothing while it still fetches."""
    global _prefetching
    remote = [each for each in shards if isinstance(each, RemoteFile)]
    missing = [each for each in remote if not (each.cache.folder / each.blake3_hex).exists()]
    if missing and not _prefetching.is_alive():
        # A daemon, so that the end does not wait for the network.
        _prefetching = threading.Thread(target=_fetch_all, args=(missing,), daemon=True)
        _prefetching.start()


def _fetch_all(files: Sequence[RemoteFile]) -> None:
    for file in files:
        # Another process fetches it, all shards are in use, or the storage gives no answer:
        # whoever reads the shard fetches it, and names what is wrong.
        with suppress(UserError):
            file.path(ahead=True)
