"""The files of a shard folder behind a URL: its manifest, its index, the sizes of its tars.

Owns: fetching and verifying them before the first step, and what reading the tars will take.
Leaves out: what they say (`index`), and reading samples (`remote_shards`).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import blake3
import numpy as np

from vitscale.config.errors import UserError
from vitscale.data.remote.cache import CHUNK_BYTES, NoRoom, ShardCache
from vitscale.data.remote.settings import RemoteSettings
from vitscale.data.remote.store import DAMAGED_READS, Damaged, RemoteStore
from vitscale.data.remote.urls import Url

if TYPE_CHECKING:
    import pyarrow as pa

MAX_MANIFEST_BYTES = 1 << 28


@dataclass(frozen=True, kw_only=True)
class RemoteShards:
    """What reading the shards of one split takes."""

    store: RemoteStore
    cache: ShardCache | None
    urls: tuple[Url, ...]
    sizes: tuple[int, ...]
    hashes: tuple[str, ...]
    """BLAKE3 of each shard, hexadecimal."""


def open_remote_shards(
    urls: Sequence[Url], *, sizes: Sequence[int], hashes: Sequence[str], reading: RemoteSettings
) -> RemoteShards:
    """Raises UserError when the server serves no ranges, or the cache cannot be written."""
    store = _store(reading)
    if urls:
        # The smallest: a server without ranges would send all of it.
        smallest = min(range(len(urls)), key=sizes.__getitem__)
        store.check_ranges(urls[smallest])
    return RemoteShards(
        store=store,
        cache=_cache(reading),
        urls=tuple(urls),
        sizes=tuple(sizes),
        hashes=tuple(hashes),
    )


def read_remote_manifest(url: Url, *, reading: RemoteSettings) -> bytes:
    """The bytes of a manifest. Raises UserError when there is none."""
    store = _store(reading)
    num_bytes = store.size(url)
    if num_bytes is None:
        raise UserError(
            "no such file",
            where=str(url),
            next_step="correct data.path; a shard folder is uploaded whole, index and manifest too",
        )
    if num_bytes > MAX_MANIFEST_BYTES:
        raise UserError(f"{num_bytes} bytes are too many for a manifest", where=str(url))
    return store.read(url, offset=0, num_bytes=num_bytes)


def remote_sizes(urls: Sequence[Url], *, reading: RemoteSettings) -> Mapping[Url, int | None]:
    """Bytes of files; None: there is no such file."""
    return dict(zip(urls, _store(reading).sizes(urls), strict=True)) if urls else {}


def remote_index(
    url: Url, *, num_bytes: int, content: str, reading: RemoteSettings
) -> Path | pa.BufferReader:
    """The index, whole and verified: in the cache where it has room for it, or else in memory.

    content: BLAKE3. Raises Damaged when the bytes have another, however often they are read.
    """
    import pyarrow as pa

    store, cache = _store(reading), _cache(reading)

    def read(offset: int, length: int) -> bytes:
        return store.read(url, offset=offset, num_bytes=length)

    for attempt in range(DAMAGED_READS):
        try:
            if cache is not None:
                with suppress(NoRoom):
                    cache.fetch(content, num_bytes=num_bytes, read=read, wait=True)
                    cache.verify(content)
                    return cache.path(content)
            return pa.BufferReader(_fetched(read, num_bytes=num_bytes, content=content))
        except Damaged:
            if attempt == DAMAGED_READS - 1:
                raise
    raise AssertionError("unreachable")


class RangeFile(io.RawIOBase):
    """A file behind a URL for reading a little of it; every read is a request, nothing is verified.

    Raises StorageError, here and while reading; OSError when there is no such file.
    """

    def __init__(self, url: Url, *, reading: RemoteSettings) -> None:
        self.url, self.store, self.at = url, _store(reading), 0
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


def first_bytes(hashes: pa.ChunkedArray) -> np.ndarray:
    """uint64 [samples]: the first 8 bytes of each 32-byte hash, little-endian."""
    parts = [
        np.frombuffer(chunk.buffers()[1], "<u8")[4 * chunk.offset :][: 4 * len(chunk) : 4]
        for chunk in hashes.chunks
        if len(chunk)
    ]
    return np.concatenate(parts) if parts else np.empty(0, np.uint64)


def _fetched(read: Callable[[int, int], bytes], *, num_bytes: int, content: str) -> bytes:
    starts = range(0, num_bytes, CHUNK_BYTES)
    data = b"".join(read(start, min(CHUNK_BYTES, num_bytes - start)) for start in starts)
    if blake3.blake3(data).hexdigest() != content:
        raise Damaged("its bytes are not those of the manifest")
    return data


def _store(reading: RemoteSettings) -> RemoteStore:
    return RemoteStore(patience_s=reading.patience_s)


def _cache(reading: RemoteSettings) -> ShardCache | None:
    """Ready to be used. Raises UserError when it cannot be written."""
    if reading.cache_path is None:
        return None
    cache = ShardCache(
        Path(reading.cache_path).expanduser().absolute(),
        max_bytes=int(reading.cache_gib * 2**30),
    )
    cache.prepare()
    return cache
