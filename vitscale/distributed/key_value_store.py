"""Exchange small messages through the key-value store that rank 0 serves.

Owns: waiting for all ranks to start, the connection that the threads of a rank share, waiting for a
key, and values that rank 0 gathers or gives to all.
Leaves out: what torch keeps in the store (addresses for gloo and NCCL).

Ranks count themselves in, and the last one sets a key for which the others wait: N ranks send O(N)
requests. If each waited for a key of every other, the store would answer O(N^2).
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from vitscale.config.errors import PeerLostError, RankError

# torch's, which a call that waits for another rank keeps to itself, and the one that the rank's
# threads share: heartbeats must not wait for collectives.
CONNECTIONS_PER_RANK = 2
# What rank 0 opens beside connections: shards, libraries, logs.
OTHER_FILES = 1024
# A wait asks soon, then less and less often: all ranks together 500 times a second at most.
SHORTEST_PAUSE_S, FIRST_S_PER_RANK, LONGEST_S_PER_RANK = 1e-3, 2e-5, 2e-3
HERE, ALL_HERE, LEFT = "vitscale/here", "vitscale/all here", "vitscale/left"
# How long rank 0 serves the store for ranks that are still reading it.
LEAVE_S = 60.0


def rendezvous(*, rank: int, world_size: int, timeout_min: float) -> dist.TCPStore:
    """Wait for every rank at the address that the launcher named; rank 0 listens there.

    Raises PeerLostError, which on rank 0 names the ranks that did not start.
    """
    env, timeout = os.environ, timedelta(minutes=timeout_min)
    address = f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}"
    if rank == 0:
        _allow_connections(world_size)
    try:
        store = dist.TCPStore(
            env["MASTER_ADDR"],
            int(env["MASTER_PORT"]),
            is_master=rank == 0,
            timeout=timeout,
            wait_for_workers=False,
        )
        store.set(f"{HERE}/{rank}", "")
        count_in(store, HERE, world_size=world_size, then=ALL_HERE)
    except RuntimeError as error:
        if rank == 0:
            what = f"cannot listen at {address}: {str(error).splitlines()[0]}"
            raise RankError(what, where="MASTER_PORT", next_step="choose a free port") from None
        raise PeerLostError(
            f"rank 0 does not answer at {address} ({timeout_min:g} min)",
            next_step="read the output of rank 0; check that MASTER_ADDR is its node",
        ) from None
    try:
        store.wait([ALL_HERE], timeout)
    except RuntimeError as error:
        raise PeerLostError(
            f"not all of {world_size} ranks started within {timeout_min:g} min; "
            f"{_missing(store, rank=rank, world_size=world_size)}",
            next_step="read the output of the missing ranks",
        ) from error
    return store


def connect(*, timeout_min: float) -> dist.TCPStore:
    """A connection beside torch's, on which no call may wait for another rank.

    torch holds its own while a collective starts. timeout_min: for rank 0 to accept it.
    """
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(minutes=timeout_min),
    )


def leave(store: dist.Store, *, rank: int, world_size: int) -> None:
    """Count this rank out; rank 0 waits for all others, for a minute at most.

    They read what it said last a little later: if it ended at once, they would find it gone.
    """
    with suppress(RuntimeError):  # rank 0 is gone, or does not wait any longer
        if rank != 0:
            store.add(LEFT, 1)
            return
        for _ in pauses(world_size, timeout_s=LEAVE_S):
            if store.add(LEFT, 0) == world_size - 1:
                return


def count_in(store: dist.Store, counter: str, *, world_size: int, then: str) -> None:
    """Count this rank; the last one sets the key `then`."""
    if store.add(f"{counter}/count", 1) == world_size:
        store.set(then, "")


def wait_for(
    store: dist.Store,
    key: str,
    *,
    world_size: int,
    timeout_s: float,
    is_over: Callable[[], bool] = lambda: False,
) -> bytes:
    """The value of a key once it is set. Leaves the connection to other threads while it waits.

    Raises RuntimeError when the store is gone, after the time-out, and when `is_over`.
    """
    for _ in pauses(world_size, timeout_s=timeout_s, is_over=is_over):
        if store.check([key]):
            break
    return store.get(key)


def pauses(
    world_size: int, *, timeout_s: float, is_over: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Attempts of a wait, with pauses between them.

    Raises RuntimeError after the time-out and when `is_over`.
    """
    end = time.monotonic() + timeout_s
    pause_s = max(SHORTEST_PAUSE_S, world_size * FIRST_S_PER_RANK)
    longest_s = max(10 * SHORTEST_PAUSE_S, world_size * LONGEST_S_PER_RANK)
    while True:
        yield
        if is_over() or time.monotonic() > end:
            raise RuntimeError("timed out waiting for other ranks through the key-value store")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)


class StoreExchange:
    """Exchange values between rank 0 and all others, by one thread of each rank.

    Every rank makes the same calls in the same order. Values are JSON. A call costs the store O(N)
    requests and bytes, since no rank but 0 receives what the others say.
    Raises RuntimeError when the store is gone, or a value has not come in time.
    """

    def __init__(
        self, store: dist.Store, name: str, *, rank: int, world_size: int, timeout_s: float
    ) -> None:
        """name: the same on all ranks, and never used before.

        timeout_s: how long rank 0 waits for the last of the others.
        """
        self._store, self._name, self._rank, self._world_size = store, name, rank, world_size
        self._timeout_s, self._number = timeout_s, 0
        self._sent: list[str] = []
        self._published: list[str] = []

    def gather(self, value: Any) -> list[Any] | None:
        """The values of all ranks, in their order, on rank 0. Others get None and do not wait."""
        store, prefix = self._store, self._next()
        counter, here = f"{prefix}/ranks", f"{prefix}/here"
        if self._rank != 0:
            self._sent.append(f"{prefix}/{self._rank}")
            store.set(self._sent[-1], json.dumps(value))
            count_in(store, counter, world_size=self._world_size - 1, then=here)
            return None
        self._wait_for(here, self._timeout_s)
        texts = store.multi_get([f"{prefix}/{rank}" for rank in range(1, self._world_size)])
        # All ranks have come here, and so have read what rank 0 published before.
        for key in (f"{counter}/count", here, *self._published):
            store.delete_key(key)
        self._published = []
        return [value, *map(json.loads, texts)]

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value."""
        key = self._next()
        if self._rank == 0:
            self._store.set(key, json.dumps(value))
            self._published.append(key)
            return value
        return self._receive(key)

    def _receive(self, key: str) -> Any:
        # Rank 0 may have waited as long for another.
        value = json.loads(self._wait_for(key, 2 * self._timeout_s))
        # It has read what this rank sent before.
        for sent in self._sent:
            self._store.delete_key(sent)
        self._sent = []
        return value

    def _wait_for(self, key: str, timeout_s: float) -> bytes:
        return wait_for(self._store, key, world_size=self._world_size, timeout_s=timeout_s)

    def _next(self) -> str:
        self._number += 1
        return f"vitscale/{self._name}/{self._number}"


def _allow_connections(world_size: int) -> None:
    """Raise the soft limit of open files to what a server for all ranks needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = world_size * CONNECTIONS_PER_RANK
    unlimited = hard == resource.RLIM_INFINITY
    if not unlimited and hard < needed + OTHER_FILES // 4:
        raise RankError(
            f"rank 0 needs {needed} connections for {world_size} ranks, and may open {hard} files",
            where="ulimit -Hn",
            next_step="ask the administrators for a higher limit of open files",
        )
    wanted = needed + OTHER_FILES if unlimited else min(hard, needed + OTHER_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _missing(store: dist.TCPStore, *, rank: int, world_size: int) -> str:
    """Rank 0 asks for all ranks; if each did, the store would answer O(N^2) requests."""
    try:
        if rank != 0:
            store.check([f"{HERE}/0"])
            return "rank 0 names the missing"
        missing = [r for r in range(world_size) if not store.check([f"{HERE}/{r}"])]
    except RuntimeError:
        return "rank 0 exited"
    return f"missing: {', '.join(map(str, missing))}"
