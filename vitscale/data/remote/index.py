"""Fetch and verify the manifest, the index and the tar sizes of a remote shard folder.

Leaves out: parsing them (`vitscale.data.index`), reading samples (`shards`).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import blake3
import numpy as np

from vitscale.config.errors import UserError
from vitscale.data.remote.cache import CHUNK_BYTES, CacheFullError, ShardCache
from vitscale.data.remote.settings import RemoteSettings
from vitscale.data.remote.store import DAMAGED_READS, DamagedError, RemoteStore
from vitscale.data.remote.urls import Url

if TYPE_CHECKING:
    import pyarrow as pa

# About 300,000 tars.
MAX_MANIFEST_BYTES = 1 << 26
STREAM_BYTES = 4 << 20
# Bytes read at a header of a tar, and the largest member that is read rather than skipped: a
# request costs about as long as a megabyte.
SMALLEST_WINDOW, LARGEST_WINDOW, NEAR_BYTES = 1 << 12, 1 << 21, 1 << 18
# A row of the index has about 80 bytes; keys may be long. An index is read into memory.
MAX_INDEX_BYTES, MAX_INDEX_ROW_BYTES, INDEX_FOOTER_BYTES = 1 << 34, 1 << 10, 1 << 20


@dataclass(frozen=True, kw_only=True)
class RemoteShards:
    """URLs, sizes and hashes of the shards of one split, with their store and cache."""

    store: RemoteStore
    cache: ShardCache | None
    urls: tuple[Url, ...]
    sizes: tuple[int, ...]
    hashes: tuple[str, ...]
    """BLAKE3 of each shard, hexadecimal."""


def open_remote_shards(
    urls: Sequence[Url],
    *,
    sizes: Sequence[int],
    hashes: Sequence[str],
    remote_settings: RemoteSettings,
) -> RemoteShards:
    """Raises UserError if the server supports no ranges, or the cache cannot be written."""
    store = _store(remote_settings)
    if urls:
        # The smallest: a server without ranges sends the whole file.
        smallest = min(range(len(urls)), key=sizes.__getitem__)
        store.check_ranges(urls[smallest])
    return RemoteShards(
        store=store,
        cache=_cache(remote_settings),
        urls=tuple(urls),
        sizes=tuple(sizes),
        hashes=tuple(hashes),
    )


def read_remote_manifest(url: Url, *, remote_settings: RemoteSettings) -> bytes:
    """The bytes of a manifest. Raises UserError if there is none."""
    store = _store(remote_settings)
    num_bytes = store.size(url)
    if num_bytes is None:
        raise UserError(
            "no such file",
            where=str(url),
            next_step="correct data.path; upload the whole shard folder, with index and manifest",
        )
    if num_bytes > MAX_MANIFEST_BYTES:
        raise UserError(
            f"has {num_bytes:,} bytes, too many for a manifest",
            where=str(url),
            allowed=f"at most {MAX_MANIFEST_BYTES:,}",
            next_step="check the address; make fewer, larger shards",
        )
    return store.read(url, offset=0, num_bytes=num_bytes)


def remote_sizes(
    urls: Sequence[Url], *, remote_settings: RemoteSettings
) -> Mapping[Url, int | None]:
    """Sizes of files in bytes; None: no such file."""
    return dict(zip(urls, _store(remote_settings).sizes(urls), strict=True)) if urls else {}


def remote_index(
    url: Url, *, num_bytes: int, num_rows: int, blake3_hex: str, remote_settings: RemoteSettings
) -> Path | pa.BufferReader:
    """The verified index: in the cache if it fits there, else in memory.

    num_rows: samples of all splits by the manifest. blake3_hex: expected hash.
    Raises UserError for an index too large for its rows, DamagedError if the bytes never have the
    hash.
    """
    import pyarrow as pa

    allowed = min(MAX_INDEX_BYTES, INDEX_FOOTER_BYTES + num_rows * MAX_INDEX_ROW_BYTES)
    if num_bytes > allowed:
        raise UserError(
            f"has {num_bytes:,} bytes, too many for an index of {num_rows:,} samples",
            where=str(url),
            allowed=f"at most {allowed:,}",
            next_step="check the address; make the shards again",
        )

    store, cache = _store(remote_settings), _cache(remote_settings)

    def read(offset: int, length: int) -> bytes:
        return store.read(url, offset=offset, num_bytes=length)

    for attempt in range(DAMAGED_READS):
        try:
            if cache is not None:
                with suppress(CacheFullError):
                    cache.fetch(blake3_hex, num_bytes=num_bytes, read=read, wait=True)
                    cache.verify(blake3_hex)
                    return cache.path(blake3_hex)
            return pa.BufferReader(_fetched(read, num_bytes=num_bytes, blake3_hex=blake3_hex))
        except DamagedError:
            if attempt == DAMAGED_READS - 1:
                raise
    raise AssertionError("unreachable")


class RangeFile(io.RawIOBase):
    """A remote file for reading small parts; every read is one request, nothing is verified.

    Opening and reading raise RemoteStorageError; opening raises OSError if there is no such file.
    """

    def __init__(self, url: Url, *, remote_settings: RemoteSettings) -> None:
        self.url, self.store, self.at = url, _store(remote_settings), 0
        num_bytes = self.store.size(url)
        if num_bytes is None:
            raise OSError("no such file")
        self.num_bytes = num_bytes

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = (0, self.at, self.num_bytes)[whence] + offset
        return self.at

    def readinto(self, buffer: Any) -> int:
        num_bytes = max(0, min(len(buffer), self.num_bytes - self.at))
        buffer[:num_bytes] = self.store.read(self.url, offset=self.at, num_bytes=num_bytes)
        self.at += num_bytes
        return num_bytes


class HeaderFile(RangeFile):
    """A remote tar of which the headers are read: far ahead where members are small, little where
    they are large."""

    def __init__(self, url: Url, *, remote_settings: RemoteSettings) -> None:
        super().__init__(url, remote_settings=remote_settings)
        self.window, self.start, self.ahead = b"", 0, SMALLEST_WINDOW

    def readinto(self, buffer: Any) -> int:
        num_bytes = max(0, min(len(buffer), self.num_bytes - self.at))
        place = self.at - self.start
        if not 0 <= place <= len(self.window) - num_bytes:
            near = 0 <= place <= len(self.window) + NEAR_BYTES
            self.ahead = min(4 * self.ahead, LARGEST_WINDOW) if near else SMALLEST_WINDOW
            length = min(max(num_bytes, self.ahead), self.num_bytes - self.at)
            self.window = self.store.read(self.url, offset=self.at, num_bytes=length)
            self.start, place = self.at, 0
        buffer[:num_bytes] = self.window[place : place + num_bytes]
        self.at += num_bytes
        return num_bytes


class RemoteFileStream(io.RawIOBase):
    """A remote file read from its start to its end, one chunk ahead; nothing is verified.

    Raises RemoteStorageError, or OSError if there is no such file.
    """

    def __init__(self, url: Url, *, remote_settings: RemoteSettings) -> None:
        self.file = RangeFile(url, remote_settings=remote_settings)
        self.pool = ThreadPoolExecutor(1)
        self.ahead = self.pool.submit(self.file.read, STREAM_BYTES)
        self.chunk, self.at = b"", 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self.at == len(self.chunk):
            self.chunk, self.at = self.ahead.result() or b"", 0
            if self.chunk:
                self.ahead = self.pool.submit(self.file.read, STREAM_BYTES)
        part = self.chunk[self.at : self.at + len(buffer)]
        buffer[: len(part)] = part
        self.at += len(part)
        return len(part)

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
        super().close()


def hash_prefix(data: bytes) -> int:
    """The first 8 bytes of the BLAKE3 of `data`, little-endian."""
    return int.from_bytes(blake3.blake3(data).digest(8), "little")


def hash_prefixes(hashes: pa.ChunkedArray) -> np.ndarray:
    """uint64 [samples]: `hash_prefix` of each sample, from its 32-byte hash."""
    parts = [
        np.frombuffer(chunk.buffers()[1], "<u8")[4 * chunk.offset :][: 4 * len(chunk) : 4]
        for chunk in hashes.chunks
        if len(chunk)
    ]
    return np.concatenate(parts) if parts else np.empty(0, np.uint64)


def _fetched(read: Callable[[int, int], bytes], *, num_bytes: int, blake3_hex: str) -> bytes:
    starts = range(0, num_bytes, CHUNK_BYTES)
    data = b"".join(read(start, min(CHUNK_BYTES, num_bytes - start)) for start in starts)
    if blake3.blake3(data).hexdigest() != blake3_hex:
        raise DamagedError("it does not have the hash of the manifest")
    return data


def _store(remote_settings: RemoteSettings) -> RemoteStore:
    return RemoteStore(patience_s=remote_settings.patience_s)


def _cache(remote_settings: RemoteSettings) -> ShardCache | None:
    """The prepared cache, if configured. Raises UserError if it cannot be written."""
    if remote_settings.cache_path is None:
        return None
    cache = ShardCache(
        Path(remote_settings.cache_path).expanduser().absolute(),
        max_bytes=int(remote_settings.cache_gib * 2**30),
    )
    cache.prepare()
    return cache
