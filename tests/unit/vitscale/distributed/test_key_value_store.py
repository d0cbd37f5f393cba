"""Messages through the store, counted; ranks are threads."""

from __future__ import annotations

import resource
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from vitscale.config.errors import RankError
from vitscale.distributed import key_value_store
from vitscale.distributed.key_value_store import Gathering, count_in, wait_for


class CountingStore:
    """A store that counts the requests of all ranks."""

    def __init__(self) -> None:
        self.store, self.requests = dist.HashStore(), Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.requests[name] += 1
        return getattr(self.store, name)


def gather(world_size: int, *, times: int) -> tuple[list[list[Any]], CountingStore]:
    store = CountingStore()

    def work(rank: int) -> list[Any]:
        gathering = Gathering(store, "saves/a", rank=rank, world_size=world_size)  # type: ignore[arg-type]  # counts
        return [gathering({"rank": rank, "time": n}, timeout_s=60.0) for n in range(times)]

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(work, range(world_size))), store


def test_gathering_gives_all_values_to_all_ranks() -> None:
    found, _ = gather(5, times=4)
    for number in range(4):
        values = [{"rank": rank, "time": number} for rank in range(5)]
        assert all(found[rank][number] == values for rank in range(5))


def test_gathering_forgets_what_all_have_read() -> None:
    store = gather(3, times=20)[1].store
    assert store.num_keys() <= 2 * (3 + 3)


def test_requests_grow_with_the_number_of_ranks_alone() -> None:
    few, many = (gather(n, times=1)[1].requests for n in (4, 32))
    for name in ("set", "add", "get", "multi_get"):
        assert many[name] <= 8 * few[name], name


def test_wait_ends_when_it_is_over() -> None:
    with pytest.raises(RuntimeError, match="timed out waiting for other ranks"):
        wait_for(dist.HashStore(), "a", world_size=2, timeout_s=60.0, is_over=lambda: True)


def test_only_the_last_rank_says_that_all_are_here() -> None:
    store = dist.HashStore()
    for _ in range(3):
        assert not store.check(["all"])
        count_in(store, "here", world_size=3, then="all")
    assert store.check(["all"])


def test_rank_0_may_open_a_connection_for_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    key_value_store._allow_connections(512)
    assert limits == [(2048, 4096)]
    with pytest.raises(RankError, match="4096 connections for 2048 ranks, and may open 4096 files"):
        key_value_store._allow_connections(2048)
