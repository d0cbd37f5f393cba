"""Read and prefetch samples of remote shards, by range or from the cache.

Owns: checking the hash of each sample, and the prefetching threads of a process.
Leaves out: requests (`store`), the cache folder (`cache`), the order (`vitscale.data.order`).

A sample is read by range until its shard is in the cache; one thread per process fetches
the shards of the current block of the order, then those of the next. So no read waits for a whole
shard, and a full cache only costs speed.
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

import numpy as np

from vitscale.config.errors import UserError
from vitscale.data.remote.index import RemoteShards, hash_prefix
from vitscale.data.remote.store import DAMAGED_READS, DamagedError

# Concurrent requests of one process: a distant store has high latency but serves many at a time.
READ_THREADS = 8
# A chunk of a shard is larger than a sample, and no read waits for it.
CHUNK_PATIENCE_S = 120.0
# Pause before a failed fetch of a shard is retried.
RETRY_FETCH_S = 30.0


class RemoteSamples:
    """Reads the samples of one split."""

    def __init__(
        self,
        shards: RemoteShards,
        *,
        shard_of: np.ndarray,
        offset: np.ndarray,
        length: np.ndarray,
        hash_prefix: np.ndarray | None,
    ) -> None:
        """Arrays as in `SplitIndex`: one entry per sample. hash_prefix: None for tars without
        hashes, whose samples are not verified."""
        self.shards, self.shard_of = shards, shard_of
        self.offset, self.length, self.hash_prefix = offset, length, hash_prefix

    def read(self, sample: int) -> bytes:
        """The image as stored. Raises DamagedError, RemoteStorageError."""
        future = _threads(os.getpid()).ahead.pop((id(self), sample), None)
        return self.read_now(sample) if future is None else future.result()

    def read_now(self, sample: int) -> bytes:
        """Like `read`, ignoring prefetched samples."""
        shards, shard = self.shards, int(self.shard_of[sample])
        offset, num_bytes = int(self.offset[sample]), int(self.length[sample])
        expected = None if self.hash_prefix is None else int(self.hash_prefix[sample])

        def is_valid(data: bytes) -> bool:
            return expected is None or hash_prefix(data) == expected

        if shards.cache is not None:
            blake3_hex = shards.hashes[shard]
            try:
                data = shards.cache.read(blake3_hex, offset=offset, num_bytes=num_bytes)
                if data is not None and is_valid(data):
                    shards.store.counts.add("cache_hits")
                    return data
                if data is not None:
                    shards.store.counts.add("cache_failures")
                    shards.cache.forget(blake3_hex)  # damaged on the local disk only
            except OSError:  # the cache disk fails; read by range
                shards.store.counts.add("cache_failures")
        return shards.store.read(
            shards.urls[shard], offset=offset, num_bytes=num_bytes, is_valid=is_valid
        )

    def is_cached(self, shard: int) -> bool:
        cache, blake3_hex = self.shards.cache, self.shards.hashes[shard]
        return cache is not None and cache.holds(blake3_hex)


def prefetch(
    samples: Sequence[tuple[RemoteSamples, int]],
    *,
    shards: Sequence[tuple[RemoteSamples, int]],
) -> None:
    """Start fetching what will be read soon; replaces the previous prefetch of this process.

    samples: of the current batch; those not in the cache are requested now, concurrently.
    shards: of the current and the next block of the order, most urgent first; fetched into the
    cache.
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
    """A shard to fetch into the cache."""

    shards: RemoteShards
    shard: int

    @property
    def blake3_hex(self) -> str:
        return self.shards.hashes[self.shard]

    def fetch(self) -> None:
        store, shards, shard = self.shards.store, self.shards, self.shard
        assert shards.cache is not None

        def read(offset: int, num_bytes: int) -> bytes:
            url, patience_s = shards.urls[shard], CHUNK_PATIENCE_S
            return store.read(url, offset=offset, num_bytes=num_bytes, patience_s=patience_s)

        shards.cache.fetch(self.blake3_hex, num_bytes=shards.sizes[shard], read=read)


@cache
def _threads(process: int) -> _Threads:
    """Per process: threads do not survive a fork."""
    return _Threads()


class _Threads:
    """Daemon threads, so that the end of a process does not wait for the network."""

    def __init__(self) -> None:
        self.ahead: dict[tuple[int, int], Future[bytes]] = {}
        """(reader, sample) -> its bytes, being fetched."""
        self._tasks: SimpleQueue[tuple[Future[bytes], Callable[[], bytes]]] = SimpleQueue()
        self._num_readers = 0
        self._wanted: list[_Wanted] = []
        self._changed = threading.Condition()
        self._fetcher: threading.Thread | None = None
        self._failed: dict[str, tuple[int, float]] = {}
        """Hash -> how often the shard was damaged, and when it failed last."""

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
            except BaseException as error:  # re-raised by result()
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
            damaged, failed_at = self._failed.get(wanted.blake3_hex, (0, -RETRY_FETCH_S))
            if damaged == DAMAGED_READS or time.monotonic() - failed_at < RETRY_FETCH_S:
                continue
            try:
                wanted.fetch()
            except (OSError, UserError) as error:
                # Not fatal: samples are read by range, which reports persistent errors.
                wanted.shards.store.counts.add("cache_failures")
                damaged += isinstance(error, DamagedError)
                pause_s = 0.0 if isinstance(error, DamagedError) else RETRY_FETCH_S
                self._failed[wanted.blake3_hex] = (
                    damaged,
                    time.monotonic() - RETRY_FETCH_S + pause_s,
                )
