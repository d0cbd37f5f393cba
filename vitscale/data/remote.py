"""Read shards at a URL through a cache of whole files on a local disk.

Fsspec supports schemes that run commands, and chains of schemes (`pipe:`, `a::b`). Both are refused
here: it gets plain URLs with a scheme of `SCHEMES` only.

A file is in the cache whole and verified, or not at all. It is named by its BLAKE3, so several sets
and jobs can share a folder, and no name from a manifest becomes a path. `HASH.part` is being
fetched by the process that locks `HA.lock`, a lock that the kernel releases however the process
ends. It has its full length from the start, to reserve the space. The modification time of a file
is its last use.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from io import BufferedWriter
from pathlib import Path
from posixpath import normpath
from random import uniform
from typing import Any, TypeVar
from urllib.parse import quote

import blake3

from vitscale.config.errors import (
    StorageError,
    UserError,
    not_written,
    print_note,
    refused,
)
from vitscale.config.redaction import redact
from vitscale.distributed.atomic_files import blake3_of_file, retried

# Time limit of one read, retries included, after which the run ends; of one request.
PATIENCE_S = 120.0
REQUEST_S = 30.0
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
CHUNK_BYTES = 8 << 20
SCHEMES = ("http", "https", "s3", "gs")
# A whitelist: fsspec gives meaning to `?`, `#`, `::` and user names in what it is handed.
_PLAIN = re.compile(
    rf"((?:{'|'.join(SCHEMES)})://[A-Za-z0-9._~:-]+|file://)(/[A-Za-z0-9._~%+=,@!:/ -]*)?"
)
# Of a hash, where a row or an index keeps its beginning.
HASH_BYTES = 8
# Bytes that are wrong this often are damaged where they are stored, or in their index.
DAMAGED_READS = 3
# A prefetch evicts no shard that was used this recently: it may be one of the current block.
IDLE_S = 60.0
# A part that grew no more for this long, longer than requests are repeated, is nobody's.
ABANDONED_S = 200.0
# Resolution of the last use.
TOUCH_S = 1.0
# The lock of a cache folder's total size.
SPACE = "space"
# Other files in the folder are neither counted nor touched.
_OURS = re.compile(r"[0-9a-f]{64}(\.part)?")
T = TypeVar("T")


def on_part_fetched() -> None:
    """Called after each part of a file; a loader's worker replaces it, to count its progress."""


def is_url(text: str) -> bool:
    """Whether a text starts like a URL, with a scheme and a colon."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", text) is not None


class Url(str):
    """A folder or file at a URL with a scheme of `SCHEMES`; `/` joins names as with paths."""

    @property
    def scheme(self) -> str:
        return self.partition(":")[0]

    def __truediv__(self, name: str) -> Url:
        """Join a relative name. Whatever it contains, the result is on this host or bucket."""
        scheme, _, rest = self.partition("://")
        authority, _, folder = rest.partition("/")
        # A raw `?` or `#` in a name would end the path of an HTTP address.
        name = quote(name) if scheme in ("http", "https") else name
        # The leading slash keeps `..` inside: `normpath` drops what would go above the root.
        path = normpath("/" + f"{folder}/{name}".lstrip("/"))
        return Url(f"{scheme}://{authority}{path}".rstrip("/"))


# A folder or file, on a file system or at a URL.
Location = Path | Url


def location_of(place: Location | str, *, where: str = "data.path") -> Location:
    """Parse a path or URL. Raises UserError for a URL that is not allowed, without quoting it: it
    may contain a password."""
    if isinstance(place, Path | Url):
        return place
    if not is_url(place):
        return Path(place)
    if not _PLAIN.fullmatch(place) or "::" in place or ".." in place.split("/"):
        raise UserError(
            f"is not a plain URL of {', '.join(SCHEMES)} or file: one without a user name, "
            "password, '?', '#', '::', '..', quotes or wildcards (credentials belong where fsspec "
            "looks for them: environment, ~/.netrc, ~/.aws); write ./ before a path with a colon",
            where=where,
        )
    path = place.removeprefix("file://")
    if path != place:
        return Path(path)
    return Url(place.rstrip("/"))


def read_chunks(url: Url, num_bytes: int | None = None) -> Iterator[bytes]:
    """The bytes of a file, in parts that are each tried again. num_bytes: its size, if known.

    Raises StorageError, or UserError if there is no such file.
    """

    def part(storage: Any) -> bytes:
        data: bytes = storage.cat_file(url, start=start, end=end, timeout=REQUEST_S)
        if len(data) != end - start:
            raise OSError(
                f"sends {len(data)} instead of {end - start} bytes from {start} on; a server must "
                "support range requests"
            )
        return data

    if num_bytes is None:  # int: a server that sends no size gives None
        num_bytes = _retried(
            url, lambda storage: int(storage.info(url, timeout=REQUEST_S)["size"])
        )
    for start in range(0, num_bytes, CHUNK_BYTES):
        end = min(start + CHUNK_BYTES, num_bytes)
        data = _retried(url, part)
        on_part_fetched()
        yield data


def names_below(folder: Url) -> list[str]:
    """Names of the files directly below a URL."""
    found = _retried(
        folder, lambda storage: storage.ls(folder, detail=True, timeout=REQUEST_S)
    )
    return [each["name"].rpartition("/")[2] for each in found if each["type"] == "file"]


def _retried(url: Url, read: Callable[[Any], T]) -> T:
    """What `read` makes of the URL's file system; tried again for `PATIENCE_S` after an error.

    A refusal, a missing file or missing credentials are an error at once.
    """
    storage = _filesystem(url.scheme)  # not counted: the first imports a lot
    start = time.monotonic()
    pause_s = FIRST_PAUSE_S
    tries = 0

    while True:
        tries += 1
        try:
            return read(storage)
        except Exception as error:  # every backend has its own kinds
            # FileNotFoundError is fsspec's for any HTTP failure, so the answer behind it decides.
            cause = (isinstance(error, FileNotFoundError) and error.__cause__) or error
            status = getattr(cause, "status", None)
            name = type(cause).__name__
            is_missing = isinstance(error, FileNotFoundError)
            is_missing &= status in (None, 404, 410)
            # The names are botocore's.
            is_refused = isinstance(error, PermissionError) or status in (401, 403)
            is_refused |= "Credentials" in name or name == "ProfileNotFound"
            spent_s = time.monotonic() - start
            text = redact(f"{name}: {cause}")
            if is_missing or is_refused or spent_s + pause_s > PATIENCE_S:
                raise (UserError if is_missing else StorageError)(
                    f"cannot be read ({text}); {tries} requests in {spent_s:.0f} s",
                    where=url,
                    next_step="check address, network and credentials, and run the command again",
                ) from None
            if tries == 3:
                print_note(f"{url}: {text}; retrying for {PATIENCE_S:.0f} s")
        # A random share of the pause, so that the workers of many nodes do not come back at once.
        time.sleep(pause_s * uniform(0.5, 1.5))
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _filesystem(scheme: str) -> Any:
    """One per process and thread: fsspec keeps them."""
    import fsspec

    try:
        if scheme == "gs":  # fsspec's default reads some buckets by gRPC
            from gcsfs.core import GCSFileSystem

            return GCSFileSystem()
        if scheme not in ("http", "https"):
            return fsspec.filesystem(scheme)
    except ImportError as error:
        raise UserError(
            f"{scheme}:// cannot be read: {error}",
            next_step="pip install s3fs, or gcsfs for gs://",
        ) from None
    # Ranges of a compressed transfer would count other bytes. Proxies and ~/.netrc are used.
    options = fsspec.config.conf.get(scheme, {})
    client = {"trust_env": True} | options.get("client_kwargs", {})
    client["auto_decompress"] = False
    headers = {"Accept-Encoding": "identity"} | options.get("headers", {})
    return fsspec.filesystem(scheme, client_kwargs=client, headers=headers)


# ---- the cache -----------------------------------------------------------------------------------


def prefix_of_hash(data: bytes | memoryview) -> int:
    """The first bytes of the BLAKE3 of `data`, little-endian."""
    return int.from_bytes(blake3.blake3(data).digest(HASH_BYTES), "little")


def has_hash(data: bytes | memoryview, hash_prefix: int | None = None) -> bool:
    """Whether bytes have this prefix of their hash; None: the one that stands at their end."""
    if hash_prefix is None:
        hash_prefix = int.from_bytes(data[-HASH_BYTES:], "little")
        # Without a copy.
        data = memoryview(data)[:-HASH_BYTES]
    return prefix_of_hash(data) == hash_prefix


@cache
def open_cache(cache_path: str | None) -> Path:
    """Make the folder of the cache. Raises UserError if none is set or it cannot be written."""
    if cache_path is None:
        raise UserError(
            "shards at a URL are fetched to a local disk first",
            where="remote.cache_path",
            next_step="set data.remote.cache_path (predict, visualize: remote.cache_path) to a "
            "folder on a disk of each node",
        )
    folder = Path(cache_path).expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Taking the lock once shows before the training whether the folder can be written.
        with locked(folder, SPACE):
            return folder
    except OSError as error:
        raise not_written(error, f"data.remote.cache_path={folder}") from None


@contextmanager
def locked(folder: Path, name: str, *, wait: bool = True) -> Iterator[None]:
    """Lock SPACE, or the files whose hash begins with `name`; a lock each would be many."""
    with open(folder / f"{name}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        try:
            yield
        finally:
            # Closing is not enough: a process forked since then may have it open, too.
            fcntl.flock(file, fcntl.LOCK_UN)


@dataclass(frozen=True)
class RemoteFile:
    """A file at a URL, with the size and hash that a manifest gives, and the cache that keeps it.

    Methods raise UserError if the storage gives no answer or wrong bytes, or the disk is full.
    """

    url: Url
    num_bytes: int
    blake3_hex: str
    folder: Path
    max_bytes: int
    """Most bytes of all files in `folder`, the cache; the least recently used is evicted first."""

    def __str__(self) -> str:
        return self.url

    @property
    def local(self) -> Path:
        """Where it is once it is fetched."""
        assert _OURS.fullmatch(self.blake3_hex), self.blake3_hex
        return self.folder / self.blake3_hex

    def path(self, *, ahead: bool = False) -> Path:
        """Local path; a missing file is fetched, once for all processes. ahead: evict nothing in
        use, and raise UserError if another process is fetching it."""
        try:
            if not self.local.exists():
                with locked(self.folder, self.blake3_hex[:2], wait=not ahead):
                    if not self.local.exists():  # not fetched meanwhile
                        self._fetch(idle_s=IDLE_S if ahead else 0.0)
        except OSError as error:
            raise refused(
                f"{self.url} cannot be kept there",
                error,
                where=self.folder,
                next_step="free space, raise data.remote.cache_gib, or choose another disk with "
                "data.remote.cache_path",
            ) from None
        return self.local

    def verified(self) -> Path:
        """Like `path`; a file that was there already is hashed, and fetched again if damaged."""
        path = self.path()
        try:
            # A file system may keep damaged bytes of a complete file, so its length proves nothing.
            found = retried(partial(blake3_of_file, path), name=path)
        except OSError:  # a bad block
            found = ""
        if found != self.blake3_hex:
            path.unlink(missing_ok=True)
        return self.path()

    def read(self, *, offset: int, num_bytes: int, hash_prefix: int | None) -> bytes:
        """Bytes of one range; fetched again if those on the local disk are damaged.

        hash_prefix: first 8 bytes of their BLAKE3; None: they end in it. Raises OSError if they are
        damaged where they are stored, and StorageError if the local disk does not give them.
        """
        failure: OSError | None = None
        for _ in range(DAMAGED_READS):
            path = self.path()
            try:
                used = partial(_read_used, path, offset, num_bytes)
                data = retried(used, name=path)
                failure = None
            except OSError as error:  # a bad block, or evicted just now
                data = b""
                failure = error
            if has_hash(data, hash_prefix):
                return data
            # A damaged copy would be found again: removed, it is fetched anew in the next round.
            with suppress(OSError):
                path.unlink()

        if failure is not None:
            raise StorageError(
                f"its copy cannot be read ({failure.strerror or failure})",
                where=f"{self.url} in {self.folder}",
                next_step="check that disk, or choose another with data.remote.cache_path",
            )
        raise OSError("its bytes do not have the hash in the index")

    def _fetch(self, *, idle_s: float) -> None:
        part = self.local.with_suffix(".part")
        try:
            with open(part, "wb") as out:
                self._reserve(out, idle_s=idle_s)
                if not any(self._copy(out) for _ in range(DAMAGED_READS)):
                    raise UserError(
                        "cannot be read: its bytes do not have the hash of the manifest",
                        where=self.url,
                        next_step="upload it again; make the shards again if the local copy is "
                        "damaged too",
                    )

            with locked(
                self.folder, SPACE
            ):  # a process that counts files would miss this one
                os.rename(part, self.local)
        except BaseException:
            # Also after Ctrl-C: a part without its process holds space until it is abandoned.
            part.unlink(missing_ok=True)
            raise

    def _reserve(self, out: BufferedWriter, *, idle_s: float) -> None:
        """Extend a file to its full length, after evicting as many others as necessary, which have
        not been used for `idle_s`. Raises OSError if there is no space."""
        with locked(self.folder, SPACE):
            files = []
            for path in self.folder.iterdir():
                with suppress(FileNotFoundError):  # just removed as damaged
                    if _OURS.fullmatch(path.name):
                        files.append((path.stat().st_mtime, path.stat().st_size, path))
            excess = self.num_bytes + sum(size for _, size, _ in files) - self.max_bytes
            for last_use, size, path in sorted(files):
                # A part has a suffix. Its process still writes to it, unless it died.
                limit_s = ABANDONED_S if path.suffix else idle_s
                if excess > 0 and time.time() - last_use >= limit_s:
                    path.unlink(missing_ok=True)
                    excess -= size
            if excess > 0:
                raise OSError(errno.ENOSPC, f"no space for {self.num_bytes} bytes")
            out.truncate(self.num_bytes)

    def _copy(self, out: BufferedWriter) -> bool:
        """Write all bytes; whether they have the right hash."""
        digest = blake3.blake3()
        out.seek(0)
        for data in read_chunks(self.url, self.num_bytes):
            digest.update(data)
            out.write(data)
        return digest.hexdigest() == self.blake3_hex


def _read_used(path: Path, offset: int, num_bytes: int) -> bytes:
    """Bytes of a file of the cache, which is marked as used. Raises OSError."""
    with open(path, "rb", buffering=0) as file:
        if time.time() - os.fstat(file.fileno()).st_mtime > TOUCH_S:
            os.utime(file.fileno())
        return os.pread(file.fileno(), num_bytes, offset)


# The thread that prefetches. Workers are forks of a server that never does.
_prefetching = threading.Thread()


def prefetch(shards: Sequence[Path | RemoteFile]) -> None:
    """Fetch shards in the background, the first first; does nothing while it still fetches."""
    global _prefetching
    missing = [
        each
        for each in shards
        if isinstance(each, RemoteFile) and not each.local.exists()
    ]

    def fetch() -> None:
        for file in missing:
            # Another process fetches it, all shards are in use, or the storage gives no answer:
            # whoever reads the shard fetches it, and names what is wrong.
            with suppress(UserError):
                file.path(ahead=True)

    if missing and not _prefetching.is_alive():
        # A daemon, so that the end does not wait for the network.
        _prefetching = threading.Thread(target=fetch, daemon=True)
        _prefetching.start()
