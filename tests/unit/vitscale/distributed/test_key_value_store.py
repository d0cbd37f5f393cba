"""Messages through the store; ranks are threads."""

from __future__ import annotations

import resource
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from vitscale.config.errors import RankError
from vitscale.distributed import key_value_store
from vitscale.distributed.key_value_store import (
    StoreExchange,
    leave,
    wait_for,
)


def exchange(world_size: int, *, times: int) -> tuple[list[list[Any]], dist.Store]:
    """What each rank gets of some rounds of gather and broadcast."""
    store = dist.HashStore()

    def work(rank: int) -> list[Any]:
        each = StoreExchange(store, "a", rank=rank, world_size=world_size, timeout_s=60.0)
        found = []
        for n in range(times):
            gathered = each.gather({"rank": rank, "time": n})
            found.append((gathered, each.broadcast(f"from {rank}")))
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
    store = exchange(3, times=20)[1]
    assert store.num_keys() <= 2


def test_wait_ends_when_it_is_over() -> None:
    with pytest.raises(RuntimeError, match="timed out waiting for other ranks"):
        wait_for(dist.HashStore(), "a", world_size=2, timeout_s=60.0, is_over=lambda: True)


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
