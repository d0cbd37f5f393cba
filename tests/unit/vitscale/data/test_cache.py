"""The cache holds whole verified files only, and keeps its size."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from blake3 import blake3

from tests.support.waiting import wait_until
from vitscale.config.errors import UserError
from vitscale.data import cache as cache_module
from vitscale.data.cache import (
    RemoteFile,
    ShardCache,
    open_cache,
    prefix_of_hash,
)
from vitscale.data.settings import RemoteSettings
from vitscale.data.storage import Url

SIZE = 1000


def content(number: int) -> bytes:
    return bytes([number]) * SIZE


def file(number: int) -> RemoteFile:
    return RemoteFile(Url(f"memory://bucket/{number}"), SIZE, blake3(content(number)).hexdigest())


def name(number: int) -> str:
    return file(number).blake3_hex


class Storage:
    """Answers requests for the files above."""

    def __init__(self) -> None:
        self.requests: Counter[int] = Counter()
        self.wrong: set[int] = set()
        self.log: Path | None = None

    def read_range(self, url: Url, *, offset: int, num_bytes: int) -> bytes:
        number = int(url.text.rpartition("/")[2])
        self.requests[number] += 1
        if self.log is not None:
            with open(self.log, "a") as log:
                log.write(f"{number}\n")
        data = content(number)[:-1] + b"x" if number in self.wrong else content(number)
        return data[offset : offset + num_bytes]


@pytest.fixture(autouse=True)
def storage(monkeypatch: pytest.MonkeyPatch) -> Storage:
    made = Storage()
    monkeypatch.setattr(cache_module, "read_range", made.read_range)
    return made


def new_cache(folder: Path, *, num_files: int = 3) -> ShardCache:
    gib = num_files * SIZE / 2**30
    return open_cache(RemoteSettings(cache_path=str(folder / "cache"), cache_gib=gib))


@pytest.fixture
def cache(tmp_path: Path) -> ShardCache:
    return new_cache(tmp_path)


def held(cache: ShardCache) -> set[str]:
    return {path.name for path in cache.folder.iterdir()} - {"lock"}


def used(cache: ShardCache, number: int, *, seconds_ago: float) -> None:
    then = time.time() - seconds_ago
    os.utime(cache.folder / name(number), (then, then))


def read(cache: ShardCache, number: int) -> bytes:
    expected = content(number)[5:12]
    return cache.read(file(number), offset=5, num_bytes=7, hash_prefix=prefix_of_hash(expected))


def test_the_least_recently_used_file_is_evicted_first(cache: ShardCache) -> None:
    for number in range(3):
        cache.path(file(number))
        used(cache, number, seconds_ago=100 - number)
    assert read(cache, 0) == content(0)[5:12]  # used just now
    cache.path(file(3))
    assert held(cache) == {name(number) for number in (0, 2, 3)}


def test_a_prefetch_evicts_nothing_in_use(cache: ShardCache) -> None:
    for number in range(3):
        cache.path(file(number))
    with pytest.raises(OSError, match="no space"):
        cache.fetch(file(3), idle_s=10)
    used(cache, 0, seconds_ago=11)
    cache.prefetch([file(1), file(4)])
    time.sleep(0.1)
    assert name(4) not in held(cache)
    cache.fetch(file(3), idle_s=10)
    assert held(cache) == {name(number) for number in (1, 2, 3)}
    used(cache, 1, seconds_ago=cache_module.IDLE_S + 1)
    cache.prefetch([file(2), file(4)])
    wait_until(lambda: name(4) in held(cache))


def test_damage_on_the_local_disk_is_fetched_again(cache: ShardCache, storage: Storage) -> None:
    path = cache.path(file(1))
    path.write_bytes(b"x" * SIZE)
    assert read(cache, 1) == content(1)[5:12]
    path.write_bytes(b"")
    assert read(cache, 1) == content(1)[5:12]
    path.write_bytes(content(1)[:-1] + b"x")
    assert cache.verified(file(1)).read_bytes() == content(1)
    assert storage.requests[1] == 4
    with pytest.raises(OSError, match="do not have the hash in the index"):
        cache.read(file(1), offset=5, num_bytes=7, hash_prefix=0)


def test_bytes_with_a_wrong_hash_are_never_kept(cache: ShardCache, storage: Storage) -> None:
    storage.wrong = {1}
    with pytest.raises(UserError, match="memory://bucket/1: cannot be read: its bytes do not have"):
        cache.path(file(1))
    assert held(cache) == set() and storage.requests[1] == cache_module.DAMAGED_READS


def test_a_full_cache_is_one_error(tmp_path: Path) -> None:
    """No sample is replaced for it."""
    small = new_cache(tmp_path, num_files=0.5)  # type: ignore[arg-type]  # half a file
    with pytest.raises(UserError, match="bucket/1 cannot be kept there .*no space for 1000 bytes"):
        read(small, 1)


def _killed_in_the_middle(cache: ShardCache) -> None:
    cache_module.read_range = lambda *place, **span: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,return-value]  # never returns
    cache.path(file(1))


def test_partial_files_of_a_killed_process_are_removed(cache: ShardCache) -> None:
    process = multiprocessing.get_context("fork").Process(
        target=_killed_in_the_middle, args=(cache,)
    )
    process.start()
    process.join()
    assert held(cache) == {f"{name(1)}.part"}
    for number in (2, 3, 4):  # these need all the room
        cache.path(file(number))
    assert held(cache) == {name(number) for number in (2, 3, 4)}
    assert cache.path(file(1)).read_bytes() == content(1)


def _fetch_all(cache: ShardCache, first: int, sizes: Path) -> None:
    for number in [*range(first, 6), *range(first)]:
        cache.path(file(number))
        inodes = {}  # by inode: a file renamed during the listing may appear twice
        with cache._lock():
            for entry in os.scandir(cache.folder):
                with suppress(FileNotFoundError):
                    inodes[entry.inode()] = entry.stat().st_size
        with open(sizes, "a") as log:
            log.write(f"{sum(inodes.values())}\n")


@pytest.mark.parametrize("limit", [100, 4])
def test_many_processes_fetch_each_file_once_and_keep_the_size(
    tmp_path: Path, storage: Storage, limit: int
) -> None:
    context = multiprocessing.get_context("fork")
    cache, sizes = new_cache(tmp_path, num_files=limit), tmp_path / "sizes"
    storage.log = tmp_path / "log"
    processes = [
        context.Process(target=_fetch_all, args=(cache, first, sizes)) for first in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert max(map(int, sizes.read_text().split())) <= limit * SIZE
    if limit == 100:
        assert sorted(map(int, storage.log.read_text().split())) == list(range(6))


def test_a_folder_that_cannot_be_made_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"data.remote.cache_path: .*cannot be written"):
        new_cache(tmp_path / "file")
    with pytest.raises(UserError, match="fetched to a local disk first"):
        open_cache(RemoteSettings())
