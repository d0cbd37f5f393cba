"""The cache holds whole verified shards only, and keeps its size."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from blake3 import blake3

from vitscale.config.errors import UserError
from vitscale.data.remote.cache import CacheFullError, ShardCache
from vitscale.data.remote.store import DamagedError

SIZE = 1000


def content(number: int) -> bytes:
    return bytes([number]) * SIZE


def name(number: int) -> str:
    return blake3(content(number)).hexdigest()


def reader(number: int, *, log: Path | None = None) -> Callable[[int, int], bytes]:
    def read(offset: int, num_bytes: int) -> bytes:
        if log is not None:
            with open(log, "a") as file:
                file.write(f"{number}\n")
        return content(number)[offset : offset + num_bytes]

    return read


@pytest.fixture
def cache(tmp_path: Path) -> ShardCache:
    made = ShardCache(tmp_path / "cache", max_bytes=3 * SIZE, idle_s=0.0)
    made.prepare()
    return made


def fetch(cache: ShardCache, number: int, *, wait: bool = False) -> bool:
    return cache.fetch(name(number), num_bytes=SIZE, read=reader(number), wait=wait)


def held(cache: ShardCache) -> set[str]:
    return {path.name for path in cache.folder.iterdir()} - {"lock"}


def used(cache: ShardCache, number: int, *, seconds_ago: float) -> None:
    then = time.time() - seconds_ago
    os.utime(cache.path(name(number)), (then, then))


def test_the_least_recently_used_shard_is_evicted_first(cache: ShardCache) -> None:
    for number in range(3):
        fetch(cache, number)
        used(cache, number, seconds_ago=100 - number)
    assert cache.read(name(0), offset=5, num_bytes=7) == content(0)[5:12]  # used just now
    fetch(cache, 3)
    assert held(cache) == {name(number) for number in (0, 2, 3)}
    assert cache.read(name(1), offset=0, num_bytes=1) is None


def test_shards_in_use_are_not_evicted(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path / "cache", max_bytes=2 * SIZE, idle_s=10.0)
    cache.prepare()
    fetch(cache, 0)
    fetch(cache, 1)
    with pytest.raises(CacheFullError):
        fetch(cache, 2)
    used(cache, 0, seconds_ago=11)
    assert fetch(cache, 2)
    assert held(cache) == {name(1), name(2)}
    with pytest.raises(CacheFullError):
        cache.fetch(name(3), num_bytes=3 * SIZE, read=reader(3))
    assert held(cache) == {name(1), name(2)}


def test_verification_removes_a_damaged_file(cache: ShardCache) -> None:
    fetch(cache, 1)
    cache.verify(name(1))
    cache.path(name(1)).write_bytes(content(1)[:-1] + b"x")
    with pytest.raises(DamagedError):
        cache.verify(name(1))
    assert held(cache) == set()


@pytest.mark.parametrize("wrong", [content(7), content(1)[:-1] + b"x"])
def test_bytes_with_a_wrong_hash_are_never_kept(cache: ShardCache, wrong: bytes) -> None:
    with pytest.raises(DamagedError):
        cache.fetch(name(1), num_bytes=SIZE, read=lambda offset, n: wrong[offset : offset + n])
    assert held(cache) == set()


def test_one_process_fetches_while_others_read_by_range(cache: ShardCache) -> None:
    def read(offset: int, num_bytes: int) -> bytes:
        # In the middle of the fetch, for whoever else comes:
        assert not fetch(cache, 1)
        assert held(cache) == {f"{name(1)}.part"}
        assert cache.read(name(1), offset=0, num_bytes=1) is None
        return content(1)[offset : offset + num_bytes]

    assert cache.fetch(name(1), num_bytes=SIZE, read=read)
    assert held(cache) == {name(1)}


def _killed_in_the_middle(cache: ShardCache) -> None:
    def read(offset: int, num_bytes: int) -> bytes:
        os.kill(os.getpid(), signal.SIGKILL)
        return b""

    cache.fetch(name(1), num_bytes=SIZE, read=read)


def test_partial_files_of_a_killed_process_are_removed(cache: ShardCache) -> None:
    process = multiprocessing.get_context("fork").Process(
        target=_killed_in_the_middle, args=(cache,)
    )
    process.start()
    process.join()
    assert held(cache) == {f"{name(1)}.part"}
    for number in (2, 3, 4):  # these need all the room
        assert fetch(cache, number)
    assert held(cache) == {name(number) for number in (2, 3, 4)}
    assert fetch(cache, 1)


def _fetch_all(cache: ShardCache, log: Path, first: int, sizes: Path) -> None:
    for number in [*range(first, 6), *range(first)]:
        cache.fetch(name(number), num_bytes=SIZE, read=reader(number, log=log), wait=True)
        inodes = {}  # by inode: a file renamed during the listing may appear twice
        with cache._lock():
            for entry in os.scandir(cache.folder):
                with suppress(FileNotFoundError):
                    inodes[entry.inode()] = entry.stat().st_size
        with open(sizes, "a") as file:
            file.write(f"{sum(inodes.values())}\n")


def test_many_processes_fetch_each_shard_once_and_keep_the_size(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for limit in (100, 4):
        cache = ShardCache(tmp_path / f"cache{limit}", max_bytes=limit * SIZE, idle_s=0.0)
        cache.prepare()
        log, sizes = tmp_path / f"log{limit}", tmp_path / f"sizes{limit}"
        processes = [
            context.Process(target=_fetch_all, args=(cache, log, first % 6, sizes))
            for first in range(4)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [0] * 4
        assert max(map(int, sizes.read_text().split())) <= limit * SIZE
        for number in range(6):
            data = cache.read(name(number), offset=0, num_bytes=SIZE)
            assert data in (None, content(number))
        if limit == 100:
            assert sorted(map(int, log.read_text().split())) == list(range(6))


def test_a_shard_is_on_disk_before_it_gets_its_name(
    cache: ShardCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, rename = os.fsync, os.rename

    def recorded_fsync(file: int) -> None:
        calls.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{file}')).name}")
        fsync(file)

    def recorded_rename(source: Path, target: Path) -> None:
        calls.append(f"rename {source.name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "rename", recorded_rename)
    assert fetch(cache, 1)
    partial = f"{name(1)}.part"
    assert calls == [f"fsync {partial}", f"rename {partial}", f"fsync {cache.folder.name}"]


def test_a_folder_that_cannot_be_made_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"data.remote.cache_path: .*cannot be written"):
        ShardCache(tmp_path / "file" / "cache", max_bytes=1).prepare()
