"""Prefetching of samples and shards, and its failures."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.corpora.shard_folders import write_shard_folder
from tests.support.range_server import RangeServer, served
from vitscale.data.index import read_split
from vitscale.data.remote.cache import ShardCache
from vitscale.data.remote.settings import RemoteSettings
from vitscale.data.remote.store import remote_metrics
from vitscale.data.samples import SplitReader


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RangeServer]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    folder = write_shard_folder(tmp_path / "shards", num_per_class=6, num_shards=3)
    with served(folder) as running:
        yield running


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
