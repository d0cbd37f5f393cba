"""Messages through the store, counted; ranks are threads."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from vitscale.config.errors import RankError
from vitscale.distributed import key_value_store
from vitscale.distributed.key_value_store import (
    ALL_HERE,
    StoreExchange,
    count_in,
    leave,
    rendezvous,
    wait_for,
)


class CountingStore:
    """A store that counts the requests of all ranks and the bytes of what they read and write."""

    def __init__(self) -> None:
        self.store, self.requests, self.num_bytes = dist.HashStore(), Counter[str](), 0
        self.waited: list[list[str]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.store, name)

        def counted(*values: Any) -> Any:
            result = method(*values)
            self.requests[name] += 1
            self.waited += [values[0]] * (name == "wait")
            self.num_bytes += size_of((values, result))
            return result

        return counted


def size_of(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    return sum(map(size_of, value)) if isinstance(value, list | tuple) else 8


def exchange(world_size: int, *, times: int) -> tuple[list[list[Any]], CountingStore]:
    """What each rank gets of some rounds of gather and broadcast."""
    store = CountingStore()

    def work(rank: int) -> list[Any]:
        each = StoreExchange(store, "a", rank=rank, world_size=world_size, timeout_s=60.0)  # type: ignore[arg-type]  # counts
        found = []
        for n in range(times):
            gathered = each.gather({"rank": rank, "time": n})
            found.append((gathered, each.broadcast(f"from {rank}")))
        assert not each.is_waiting
        return found

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(work, range(world_size))), store


def test_rank_0_gathers_and_broadcasts() -> None:
    found, _ = exchange(5, times=4)
    for number in range(4):
        values = [{"rank": rank, "time": number} for rank in range(5)]
        for rank in range(5):
            gathered = values if rank == 0 else None
            assert found[rank][number] == (gathered, "from 0")


def test_exchange_forgets_what_has_been_read() -> None:
    store = exchange(3, times=20)[1].store
    assert store.num_keys() <= 2


def test_requests_and_bytes_grow_with_the_ranks_alone() -> None:
    few, many = (exchange(n, times=1)[1] for n in (4, 32))
    for name in ("set", "add", "get", "multi_get", "delete_key"):
        assert 0 < many.requests[name] <= 12 * few.requests[name], name
    polls = 80 * (many.requests["check"] - few.requests["check"])
    assert many.num_bytes - polls <= 12 * few.num_bytes


def test_each_rank_waits_for_one_key_to_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    store, served = CountingStore(), list[int]()
    monkeypatch.setattr(dist, "TCPStore", lambda *_, **__: store)
    monkeypatch.setattr(key_value_store, "_allow_connections", served.append)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda r: rendezvous(rank=r, world_size=8, timeout_min=1.0), range(8)))
    assert store.waited == [[ALL_HERE]] * 8 and served == [8]


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


def test_rank_0_leaves_last() -> None:
    """It serves the store, which the others may still be reading."""
    store, size = dist.HashStore(), 5
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(leave, store, rank=0, world_size=size)
        for rank in range(1, size):
            with pytest.raises(TimeoutError):
                first.result(timeout=0.05)
            leave(store, rank=rank, world_size=size)
        first.result(timeout=60)


def test_rank_0_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_value_store, "LEAVE_S", 0.01)
    leave(dist.HashStore(), rank=0, world_size=2)
