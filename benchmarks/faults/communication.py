"""Count what ranks send each other beside gradients: requests, bytes and sockets of large worlds.

Ranks are threads with a connection of their own to a real key-value store (torch's TCPStore), and
run the product's code. Requests are counted as the ranks make them; bytes are keys and values.
In `before` rows each rank waits for a key of every other, as torch's tutorials do, and the answers
of a save go to all ranks.
Sockets are counted of real gloo groups whose ranks are threads of this process.

    python benchmarks/faults/communication.py --ranks 16 512 1024 4096

`dead_rank.py` counts heartbeats.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a warning per connection
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout

from vitscale.distributed import preemption
from vitscale.distributed.key_value_store import ALL_HERE, HERE, StoreExchange, count_in
from vitscale.distributed.node_share import node_identity
from vitscale.distributed.world import World

TIMEOUT = timedelta(minutes=10)
# A step of a real rank: the store and its client pause between two.
STEPS, STEP_S = 20, 0.2
PER_NODE = 8
# What ranks say at a save: `commit`.
OFFER = {"path": "/dev/shm/vitscale-1000-k3j2h1g0.shared", "writer": 1016}
VERDICT: dict[str, Any] = {"warnings": []}
# More threads would wait for this machine rather than for each other.
MOST_THREADS = 1024
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
    """One exchange."""

    what: str
    ranks: int
    requests: float
    """Of all ranks together, as `kib` and `keys_waited`."""
    kib: float
    keys_waited: float
    of_a_rank: float
    """KiB that one rank writes and reads, at most, without rank 0."""
    seconds: float

    def text(self) -> str:
        return (
            f"{self.what:<28}{self.ranks:>6}{self.requests:>12,.0f}{self.kib:>12,.0f}"
            f"{self.of_a_rank:>12,.2f}{self.keys_waited:>12,.0f}{self.seconds:>8.2f}"
        )


TITLES = (
    f"{'':<28}{'ranks':>6}{'requests':>12}{'KiB':>12}{'of a rank':>12}{'keys waited':>12}{'s':>8}"
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

    def run(
        self, what: str, work: Callable[[int, Any], object], *, num_threads: int | None = None
    ) -> Row:
        """Run `work` on every rank at once, or on the first `num_threads`; what it costs."""
        before, num_threads = self._counts(), num_threads or self.num_ranks
        barrier = threading.Barrier(num_threads + 1)

        def one(rank: int) -> None:
            barrier.wait()
            work(rank, self.stores[rank])

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(num_threads)]
        for thread in threads:
            thread.start()
        barrier.wait()
        start = time.perf_counter()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - start
        costs = [
            [a - b for a, b in zip(*pair, strict=True)]
            for pair in zip(self._counts(), before, strict=True)
        ]
        requests, num_bytes, waited = map(sum, zip(*costs, strict=True))
        of_a_rank = max(each[1] for each in costs[1:]) / 1024
        return Row(what, self.num_ranks, requests, num_bytes / 1024, waited, of_a_rank, seconds)

    def _counts(self) -> list[tuple[int, int, int]]:
        return [(each.requests, each.bytes, each.keys_waited) for each in self.stores]

    def world(self, rank: int) -> World:
        return World(
            rank=rank,
            world_size=self.num_ranks,
            local_rank=0,
            local_world_size=1,
            device=torch.device("cpu"),
            store=self.stores[rank],  # type: ignore[arg-type]  # counts
        )


def store_rows(ranks: Ranks) -> Iterator[Row]:
    """What the product asks of the store, but for heartbeats."""
    num_ranks = ranks.num_ranks
    everybody = range(num_ranks)

    def wait_for_each(rank: int, store: Any) -> None:
        store.set(f"before/{rank}", "")
        store.wait([f"before/{other}" for other in everybody], TIMEOUT)

    def wait_for_last(rank: int, store: Any) -> None:
        store.set(f"{HERE}/{rank}", "")
        count_in(store, HERE, world_size=num_ranks, then=ALL_HERE)
        store.wait([ALL_HERE], TIMEOUT)

    def exchange(name: str, rank: int, store: Any) -> StoreExchange:
        timeout_s = TIMEOUT.total_seconds()
        return StoreExchange(store, name, rank=rank, world_size=num_ranks, timeout_s=timeout_s)

    def save_to_all(rank: int, store: Any) -> None:
        each = exchange("before", rank, store)
        for value in (SHARE, VERDICT):
            each.broadcast(each.gather(value))

    def save(rank: int, store: Any) -> None:
        each = exchange("save", rank, store)
        each.gather(SHARE)
        each.broadcast(VERDICT)

    def first_joined_save(rank: int, store: Any) -> None:
        each, writers = exchange("joined", rank, store), [r - r % PER_NODE for r in everybody]
        each.gather((node_identity(), 1 << 20))
        writer = each.scatter(writers)
        each.gather({} if writer == rank else OFFER)
        each.scatter(
            [[OFFER["path"]] * (PER_NODE - 1) if r == writers[r] else [] for r in everybody]
        )
        each.gather(SHARE if writer == rank else {})
        each.broadcast(VERDICT)

    yield ranks.run("rendezvous, before", wait_for_each)
    yield ranks.run("rendezvous", wait_for_last)
    yield ranks.run("save, before", save_to_all)
    yield ranks.run("save", save)
    yield ranks.run("first save, joined files", first_joined_save)


def save_in_turn(ranks: Ranks) -> Row:
    """One save in which nobody waits: the others speak, then rank 0, then they read."""
    exchanges = [
        StoreExchange(store, "turn", rank=rank, world_size=ranks.num_ranks, timeout_s=60.0)  # type: ignore[arg-type]  # counts
        for rank, store in enumerate(ranks.stores)
    ]

    def work(rank: int, _: Any) -> None:
        if rank == 0:
            for each in reversed(exchanges):
                each.gather(SHARE)
            for each in exchanges:
                each.broadcast(VERDICT)

    return ranks.run("save, nobody waits", work, num_threads=1)


def stop_rows(ranks: Ranks) -> Iterator[str]:
    """The stop flag over some steps, then a signal to the last rank."""
    # One of each process.
    preemption._numbers = iter([0] * ranks.num_ranks)  # type: ignore[assignment]  # a count
    flags = [preemption._Decisions(ranks.world(rank)) for rank in range(ranks.num_ranks)]
    waited, stopped = [0.0] * ranks.num_ranks, [0] * ranks.num_ranks
    gradients = threading.Barrier(ranks.num_ranks)

    def train(rank: int, _: Any) -> None:
        stops, step = False, 0
        while not stops:
            received = rank == ranks.num_ranks - 1 and step >= STEPS
            start = time.perf_counter()
            stops = flags[rank].ask(received)
            waited[rank] += time.perf_counter() - start
            step += 1
            time.sleep(STEP_S)
            gradients.wait()
        stopped[rank] = step - STEPS

    row = ranks.run("stop flag", train)
    assert len(set(stopped)) == 1, "ranks stopped at different steps"
    num = len(flags[0]._published)
    yield row._replace(
        what="stop flag, one decision",
        requests=row.requests / num,
        kib=row.kib / num,
        of_a_rank=row.of_a_rank / num,
        seconds=row.seconds / num,
    ).text()
    steps = STEPS + stopped[0]
    yield (
        f"    {num} decisions in {steps} steps of {STEP_S} s; all stop {stopped[0]} steps after a "
        f"signal to one; a step waits {1e3 * max(waited) / steps:.1f} ms for them"
    )
    for each in flags:
        each.close()


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
    parser.add_argument("--ranks", type=int, nargs="*", default=[16, 512, 1024, 4096])
    parser.add_argument("--gloo-ranks", type=int, nargs="*", default=[4, 16, 64])
    arguments = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for num_ranks in arguments.gloo_ranks:
        for is_lazy in (False, True):
            print(gloo_row(num_ranks, is_lazy=is_lazy), flush=True)
    print(TITLES)
    for num_ranks in arguments.ranks:
        ranks = Ranks(num_ranks)
        print(save_in_turn(ranks).text(), flush=True)
        if num_ranks > MOST_THREADS:
            continue
        for row in store_rows(ranks):
            print(row.text(), flush=True)
        for text in stop_rows(ranks):
            print(text, flush=True)
    os._exit(0)  # the threads of gloo need not end


if __name__ == "__main__":
    main()
