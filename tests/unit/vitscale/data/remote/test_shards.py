"""Prefetching of samples and shards, and its failures."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.corpora.shard_folders import write_shard_folder
from tests.support.range_server import RangeServer, served
from tests.support.waiting import wait_until
from vitscale.config.errors import UserError
from vitscale.data.index import read_split
from vitscale.data.remote import shards as remote_shards
from vitscale.data.remote.cache import ShardCache
from vitscale.data.remote.settings import RemoteSettings
from vitscale.data.remote.store import DAMAGED_READS, DamagedError, remote_metrics
from vitscale.data.samples import SplitReader


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RangeServer]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    folder = write_shard_folder(tmp_path / "shards", num_per_class=6, num_shards=3)
    with served(folder) as running:
        yield running


def test_samples_of_the_current_batch_are_prefetched(
    server: RangeServer,
) -> None:
    reader = SplitReader(read_split(server.url, split="train"))
    assert reader.remote is not None
    tars = {f"train-{number:06d}.tar": 4 for number in range(3)}
    server.requests.clear()
    remote_shards.prefetch([(reader.remote, sample) for sample in range(12)], shards=[])
    wait_until(lambda: dict(server.requests) == tars)
    assert len({reader.bytes_of(sample) for sample in range(12)}) == 12
    assert dict(server.requests) == tars


def test_a_subset_of_remote_samples_reads_the_right_bytes(server: RangeServer) -> None:
    whole = read_split(server.url, split="train")
    rows = np.array([1, 4, 10])
    subset = SplitReader(whole.subset(rows, name="some"))
    expected = SplitReader(whole)
    assert [subset.bytes_of(sample) for sample in range(3)] == [
        expected.bytes_of(row) for row in rows.tolist()
    ]


def test_samples_are_read_by_range_if_the_cache_disk_fails(
    server: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **more: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    remote_settings = RemoteSettings(cache_path=str(tmp_path / "cache"))
    reader = SplitReader(read_split(server.url, split="train", remote_settings=remote_settings))
    monkeypatch.setattr(ShardCache, "read", fail)
    before = remote_metrics()["vitals/remote_cache_failures"]
    plain = SplitReader(read_split(server.url, split="train"))
    assert reader.bytes_of(5) == plain.bytes_of(5)
    assert remote_metrics()["vitals/remote_cache_failures"] == before + 1


class Fetches:
    """Records fetches of fake shards; each fetch raises the next error of `ends`."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failures: list[str] = []
        self.threads = remote_shards._Threads()

    def shard(self, content: str, *ends: Exception) -> Any:
        left = list(ends)

        def fetch() -> None:
            self.calls.append(content)
            if left:
                raise left.pop(0)

        counts = SimpleNamespace(add=self.failures.append)
        shards = SimpleNamespace(store=SimpleNamespace(counts=counts))
        return SimpleNamespace(blake3_hex=content, fetch=fetch, shards=shards)

    def want(self, *wanted: Any) -> None:
        """Returns after all of them were handled."""
        seen = len(self.calls)
        self.threads.want([*wanted, self.shard("last")])
        wait_until(lambda: "last" in self.calls[seen:])


def test_a_failed_fetch_does_not_stop_later_ones() -> None:
    fetches = Fetches()
    for error in (OSError("disk"), DamagedError("bytes"), UserError("package"), UserError("again")):
        fetches.want(fetches.shard(str(error), error))
    assert fetches.calls == ["disk", "last", "bytes", "last", "package", "last", "again", "last"]
    assert fetches.failures == ["cache_failures"] * 4


def test_a_failed_fetch_is_retried_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    fetches = Fetches()
    shard = fetches.shard("a", UserError("down"))
    for _ in range(3):
        fetches.want(shard)
    assert fetches.calls.count("a") == 1
    monkeypatch.setattr(remote_shards, "RETRY_FETCH_S", 0.0)
    fetches.want(shard)
    assert fetches.calls.count("a") == 2


def test_a_damaged_shard_is_fetched_a_limited_number_of_times() -> None:
    fetches = Fetches()
    shard = fetches.shard("a", *[DamagedError("rot")] * 9)
    for _ in range(DAMAGED_READS + 2):
        fetches.want(shard)
    assert fetches.calls.count("a") == DAMAGED_READS
