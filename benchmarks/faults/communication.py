"""Count what ranks send each other beside gradients: requests, bytes and sockets of large worlds.

Ranks are threads with a connection of their own to a real key-value store (torch's TCPStore), and
run the product's code. Requests are counted as the ranks make them; bytes are keys and values.
`before` rows wait for one key of each rank, as torch's tutorials do.
Sockets are counted of real gloo groups whose ranks are threads of this process.

    python benchmarks/faults/communication.py --ranks 16 128 512 1024
"""

from __future__ import annotations

import argparse
import os
import resource
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from vitscale.distributed import preemption
from vitscale.distributed.heartbeat_table import RUNNING, Beat, HeartbeatTable
from vitscale.distributed.key_value_store import ALL_HERE, HERE, Gathering, count_in
from vitscale.distributed.world import World

TIMEOUT = timedelta(minutes=10)
STEPS = 20
# Of a real rank: the store and its client pause between steps.
STEP_S = 0.2
SHARE = {"file": "rank-00000.safetensors", "entry": {"bytes": 1, "blake3": "0" * 64}}


class Counted:
    """A connection to the store that counts its requests and their bytes."""

    def __init__(self, store: dist.Store) -> None:
        self._store, self.requests, self.bytes, self.keys_waited = store, 0, 0, 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._store, name)

        def counted(*values: Any) -> Any:
            result = method(*values)
            self.requests += 1
            self.bytes += sum(map(_size, (*values, result)))
            if name == "wait":
                self.keys_waited += len(values[0])
            return result

        return counted


def _size(value: Any) -> int:
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, (list, tuple)):
        return sum(map(_size, value))
    return 8 if isinstance(value, int) else 0


class Row(NamedTuple):
    """Of all ranks together."""

    what: str
    ranks: int
    requests: float
    kib: float
    keys_waited: int
    seconds: float

    def text(self) -> str:
        waited = f"{self.keys_waited:>10}"
        return (
            f"{self.what:<34}{self.ranks:>6}{self.requests:>12.0f}{self.kib:>11.0f}{waited}"
            f"{self.seconds:>9.3f}"
        )


class Ranks:
    """A store and a connection of every rank to it."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with ThreadPoolExecutor(64) as pool:
            self.stores = list(pool.map(lambda _: self._connect(), range(num_ranks)))

    def _connect(self) -> Counted:
        port = self._server.port
        return Counted(
            dist.TCPStore("127.0.0.1", port, None, False, TIMEOUT, wait_for_workers=False)
        )

    def run(self, what: str, work: Callable[[int, Any], object], *, times: int = 1) -> Row:
        """Run `work` on every rank at once; what one of its `times` repetitions costs."""
        before = [(each.requests, each.bytes, each.keys_waited) for each in self.stores]
        barrier = threading.Barrier(self.num_ranks + 1)

        def one(rank: int) -> None:
            barrier.wait()
            work(rank, self.stores[rank])

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.num_ranks)]
        for thread in threads:
            thread.start()
        barrier.wait()
        start = time.perf_counter()
        for thread in threads:
            thread.join()
        seconds = (time.perf_counter() - start) / times
        after = [(each.requests, each.bytes, each.keys_waited) for each in self.stores]
        totals = [sum(a[i] - b[i] for a, b in zip(after, before, strict=True)) for i in range(3)]
        requests, num_bytes, waited = (total / times for total in totals)
        return Row(what, self.num_ranks, requests, num_bytes / 1024, int(waited), seconds)

    def world(self, rank: int) -> World:
        return World(
            rank=rank,
            world_size=self.num_ranks,
            local_rank=0,
            local_world_size=1,
            device=torch.device("cpu"),
            store=self.stores[rank],  # type: ignore[arg-type]  # counts
        )


def store_rows(num_ranks: int) -> Iterable[Row]:
    """What the product asks of the store."""
    ranks = Ranks(num_ranks)

    def wait_for_each(rank: int, store: Any) -> None:
        store.set(f"before/{rank}", "")
        store.wait([f"before/{other}" for other in range(num_ranks)], TIMEOUT)

    def wait_for_last(rank: int, store: Any) -> None:
        store.set(f"{HERE}/{rank}", "")
        count_in(store, HERE, world_size=num_ranks, then=ALL_HERE)
        store.wait([ALL_HERE], TIMEOUT)

    yield ranks.run("rendezvous, before", wait_for_each)
    yield ranks.run("rendezvous", wait_for_last)

    preemption._numbers = iter([0] * num_ranks)  # type: ignore[assignment]  # one of each process
    flags = [preemption._Decisions(ranks.world(rank)) for rank in range(num_ranks)]

    def train(rank: int, _: Any) -> None:
        for _ in range(STEPS):
            flags[rank].ask(received=False)
            time.sleep(STEP_S)

    row = ranks.run("stop flag, a step of 0.2 s", train, times=STEPS)
    yield row._replace(seconds=max(0.0, row.seconds - STEP_S))
    for each in flags:
        each.close()

    def save(rank: int, store: Any) -> None:
        gathering = Gathering(store, "save", rank=rank, world_size=num_ranks)
        for value in (SHARE, None):
            gathering(value, timeout_s=TIMEOUT.total_seconds())

    yield ranks.run("both exchanges of a save", save)

    table = HeartbeatTable(num_ranks, period_s=3.0, dead_s=45.0, late_s=420.0)
    keys = [f"beats/{rank}" for rank in range(num_ranks)]
    ranks.stores[0].set("watch", "1\t")
    for store, key in zip(ranks.stores, keys, strict=True):
        store.set(key, "")

    def beat(rank: int, store: Any) -> None:
        text = Beat(1, 1, RUNNING, "node0123", "running the backward pass").text()
        store.set(keys[rank], text)
        if rank == 0:
            store.check(keys)
            beats = [Beat.parse((each or text.encode()).decode()) for each in store.multi_get(keys)]
            table.problem(beats, now=0.0)
            store.set("watch", "1\t")
        else:
            store.check(["watch"])
            store.get("watch")

    yield ranks.run("heartbeats of a period of 3 s", beat)


def num_sockets() -> int:
    """Of this process."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{number}").startswith("socket:")
        except FileNotFoundError:
            continue
    return found


def gloo_row(num_ranks: int, *, is_lazy: bool) -> str:
    """Sockets and requests of one group, after the collectives that the product uses."""
    os.environ["TORCH_GLOO_LAZY_INIT"] = str(int(is_lazy))
    base, before = dist.HashStore(), num_sockets()

    def join(rank: int) -> dist.ProcessGroupGloo:
        return dist.ProcessGroupGloo(base, rank, num_ranks, TIMEOUT)

    with ThreadPoolExecutor(num_ranks) as pool:
        groups = list(pool.map(join, range(num_ranks)))
    opened = num_sockets() - before
    ones = [torch.ones(1) for _ in range(num_ranks)]
    rows = [[[torch.ones(1) for _ in range(num_ranks)]] for _ in range(num_ranks)]
    starts: list[Callable[[int], Any]] = [
        lambda rank: groups[rank].allreduce([ones[rank]]),
        lambda rank: groups[rank].allgather(rows[rank], [ones[rank]]),
        lambda rank: groups[rank].broadcast(ones[rank], 0),
    ]
    for start in starts:
        for work in [start(rank) for rank in range(num_ranks)]:
            work.wait()
    used = num_sockets() - before
    kind = "when they first talk" if is_lazy else "at the start"
    each = f"{opened / num_ranks:.1f} at the start, {used / num_ranks:.1f} after collectives"
    return f"gloo connected {kind:<22}{num_ranks:>4} ranks; sockets of a rank: {each}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 128, 512, 1024])
    parser.add_argument("--gloo-ranks", type=int, nargs="+", default=[4, 16, 64])
    arguments = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for num_ranks in arguments.gloo_ranks:
        for is_lazy in (False, True):
            print(gloo_row(num_ranks, is_lazy=is_lazy), flush=True)
    titles = ("requests", "KiB", "keys waited", "s")
    print(f"{'':<34}{'ranks':>6}{titles[0]:>12}{titles[1]:>11}{titles[2]:>12}{titles[3]:>7}")
    for num_ranks in arguments.ranks:
        for row in store_rows(num_ranks):
            print(row.text(), flush=True)
    os._exit(0)  # the threads of gloo need not end


if __name__ == "__main__":
    main()
