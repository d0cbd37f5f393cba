"""Ranks as threads of one process, for code whose collectives are given to it as functions."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from vitscale.distributed.world import World

T = TypeVar("T")
WAIT_S = 120.0


def world_of(
    rank: int = 0,
    size: int = 1,
    *,
    per_node: int | None = None,
    store: dist.Store | None = None,
) -> World:
    """One rank of `size`, on a CPU; per_node: ranks of a node, all of them by default."""
    per_node = per_node or size
    return World(
        rank=rank,
        world_size=size,
        local_rank=rank % per_node,
        local_world_size=per_node,
        device=torch.device("cpu"),
        store=store,
    )


def run_ranks(
    num_ranks: int, work: Callable[[int, Callable[[Any], list[Any]]], T]
) -> list[T]:
    """The results of `work(rank, gather)` of all ranks; `gather` exchanges one value per rank."""
    barrier = threading.Barrier(num_ranks)
    values = [None] * num_ranks

    def run_rank(rank):
        def gather(value):
            values[rank] = value
            barrier.wait(WAIT_S)
            gathered = list(values)
            # No rank may write its next value before all have read these.
            barrier.wait(WAIT_S)
            return gathered

        try:
            return work(rank, gather)
        except BaseException:
            # The others would wait for this rank.
            barrier.abort()
            raise

    with ThreadPoolExecutor(num_ranks) as pool:
        futures = [pool.submit(run_rank, rank) for rank in range(num_ranks)]
    # The error that made the others give up, not one of theirs.
    errors = [future.exception() for future in futures]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError | None):
            raise error
    return [future.result() for future in futures]
