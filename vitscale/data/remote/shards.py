"""Samples of shards that lie behind a URL, by range or from the cache; fetched ahead of use.

Owns: that a sample's bytes are those of the index, and the threads that read ahead in a process.
Leaves out: requests (`remote_store`), the cache's folder (`shard_cache`), the order (`order`).

A sample is read by range as long as its shard is not in the cache; meanwhile one thread per process
fetches the shards of the order's present block, then those of its next one. So nothing waits for a
whole shard, and a cache that has no room costs speed alone.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache, partial
from queue import SimpleQueue

import blake3
import numpy as np

from vitscale.config.errors import UserError
from vitscale.data.remote.index import RemoteShards
from vitscale.data.remote.store import DAMAGED_READS, Damaged

# Requests of one process under way at once: a distant store answers late, but many at a time.
READ_THREADS = 8
# A chunk of a shard is larger than a sample, and nobody waits for it.
CHUNK_PATIENCE_S = 120.0
# After a fetch failed, its shard is left alone for so long.
FETCH_AGAIN_S = 30.0


class RemoteSamples:
    """Stored bytes of one split's samples."""

    def __init__(
        self,
        shards: RemoteShards,
        *,
        shard_of: np.ndarray,
        offset: np.ndarray,
        length: np.ndarray,
        content: np.ndarray,
    ) -> None:
        """Arrays as in `SplitIndex`, one entry per sample."""
        self.shards, self.shard_of = shards, shard_of
        self.offset, self.length, self.content = offset, length, content

    def read(self, sample: int) -> bytes:
        """An image as stored. Raises Damaged, StorageError."""
        future = _threads(os.getpid()).ahead.pop((id(self), sample), None)
        return self.read_now(sample) if future is None else future.result()

    def read_now(self, sample: int) -> bytes:
        """Without regard to what is under way."""
        shards, shard = self.shards, int(self.shard_of[sample])
        offset, num_bytes = int(self.offset[sample]), int(self.length[sample])
        first_bytes = int(self.content[sample])

        def is_right(data: bytes) -> bool:
            return int.from_bytes(blake3.blake3(data).digest(8), "little") == first_bytes

        if shards.cache is not None:
            content = shards.hashes[shard]
            try:
                data = shards.cache.read(content, offset=offset, num_bytes=num_bytes)
                if data is not None and is_right(data):
                    shards.store.counts.add("cache_hits")
                    return data
                if data is not None:
                    shards.store.counts.add("cache_failures")
                    shards.cache.forget(content)  # rotten on the disk; the store has it still
            except OSError:  # of the cache's disk, and no fault of the sample
                shards.store.counts.add("cache_failures")
        return shards.store.read(
            shards.urls[shard], offset=offset, num_bytes=num_bytes, is_right=is_right
        )

    def is_cached(self, shard: int) -> bool:
        cache, content = self.shards.cache, self.shards.hashes[shard]
        return cache is not None and cache.holds(content)


def read_ahead(
    samples: Sequence[tuple[RemoteSamples, int]],
    *,
    shards: Sequence[tuple[RemoteSamples, int]],
) -> None:
    """Begin to fetch what will be read soon.

    samples: of the batch at hand; those not in the cache are requested now, several at once.
    shards: of this and the next block of the order, most urgent first; fetched into the cache.
    Replaces what was announced before in this process.
    """
    threads = _threads(os.getpid())
    cached: dict[tuple[int, int], bool] = {}

    def is_cached(reader: RemoteSamples, shard: int) -> bool:
        key = (id(reader), shard)
        if key not in cached:
            cached[key] = reader.is_cached(shard)
        return cached[key]

    for store, url in {(reader.shards.store, reader.shards.urls[0]) for reader, _ in samples}:
        store.connect(url)
    threads.ahead = {}
    for reader, sample in samples:
        key = (id(reader), sample)
        if key not in threads.ahead and not is_cached(reader, int(reader.shard_of[sample])):
            threads.ahead[key] = threads.start(partial(reader.read_now, sample))
    threads.want(
        [
            _Wanted(reader.shards, shard)
            for reader, shard in shards
            if reader.shards.cache is not None and not is_cached(reader, shard)
        ]
    )


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A shard that is not in the cache yet."""

    shards: RemoteShards
    shard: int

    @property
    def content(self) -> str:
        return self.shards.hashes[self.shard]

    def fetch(self) -> None:
        store, shards, shard = self.shards.store, self.shards, self.shard
        assert shards.cache is not None

        def read(offset: int, num_bytes: int) -> bytes:
            url, patience_s = shards.urls[shard], CHUNK_PATIENCE_S
            return store.read(url, offset=offset, num_bytes=num_bytes, patience_s=patience_s)

        shards.cache.fetch(self.content, num_bytes=shards.sizes[shard], read=read)


@cache
def _threads(process: int) -> _Threads:
    """By process: threads do not survive a fork."""
    return _Threads()


class _Threads:
    """Daemons, so that a process that ends does not wait for the network."""

    def __init__(self) -> None:
        self.ahead: dict[tuple[int, int], Future[bytes]] = {}
        """(reader, sample) -> its bytes, under way."""
        self._tasks: SimpleQueue[tuple[Future[bytes], Callable[[], bytes]]] = SimpleQueue()
        self._num_readers = 0
        self._wanted: list[_Wanted] = []
        self._changed = threading.Condition()
        self._fetcher: threading.Thread | None = None
        self._failed: dict[str, tuple[int, float]] = {}
        """Content -> how often it came damaged, and when it failed last."""

    def start(self, read: Callable[[], bytes]) -> Future[bytes]:
        while self._num_readers < READ_THREADS:
            threading.Thread(target=self._read, daemon=True).start()
            self._num_readers += 1
        future: Future[bytes] = Future()
        self._tasks.put((future, read))
        return future

    def _read(self) -> None:
        while True:
            future, read = self._tasks.get()
            try:
                future.set_result(read())
            except BaseException as error:  # raised again where the result is asked for
                future.set_exception(error)

    def want(self, wanted: list[_Wanted]) -> None:
        if not wanted and self._fetcher is None:
            return
        with self._changed:
            self._wanted = wanted
            self._changed.notify()
        if self._fetcher is None:
            self._fetcher = threading.Thread(target=self._fetch, daemon=True)
            self._fetcher.start()

    def _fetch(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted)
                wanted = self._wanted.pop(0)
            damaged, failed_at = self._failed.get(wanted.content, (0, -FETCH_AGAIN_S))
            if damaged == DAMAGED_READS or time.monotonic() - failed_at < FETCH_AGAIN_S:
                continue
            try:
                wanted.fetch()
            except (OSError, UserError) as error:
                # Not lost: samples are read by range, and that names what does not work.
                wanted.shards.store.counts.add("cache_failures")
                damaged += isinstance(error, Damaged)
                pause_s = 0.0 if isinstance(error, Damaged) else FETCH_AGAIN_S
                self._failed[wanted.content] = (
                    damaged,
                    time.monotonic() - FETCH_AGAIN_S + pause_s,
                )
