"""Measure how long the other ranks of a large world take to name a dead one.

    python benchmarks/faults/dead_rank.py --ranks 16 512 1024

Each rank is the product's `Heartbeat`, two threads with a connection of their own to a real
key-value store, and the usual periods. One rank stops sending. In the first case nothing else
happens, as with NCCL, whose collectives just wait; in the second its neighbours lose their
connection, as with gloo. Times count from the last heartbeat of the dead rank.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout

from benchmarks.faults.communication import Ranks
from vitscale.distributed.failures import watch
from vitscale.distributed.failures.heartbeat import LONGEST_PERIOD_S, Heartbeat

TIMEOUT_MIN = 10.0  # the default of engine.timeout_min
PERIODS = 4


class Watched(Heartbeat):
    """Notes when its process would end, and why."""

    ended: tuple[float, str] | None = None

    def _stop(self, what: str) -> None:
        self.ended = self.ended or (time.monotonic(), what)
        self._end.set()


def measure(ranks: Ranks, *, loses_connections: bool) -> str:
    watch.BEATS, watch.WATCH = (f"{loses_connections}/{key}" for key in ("beats", "watch"))
    beats = [Watched(ranks.world(rank), timeout_min=TIMEOUT_MIN) for rank in range(ranks.num_ranks)]
    for each in beats:
        each.__enter__()
    time.sleep(1.5 * LONGEST_PERIOD_S)
    before, start = sum(each.requests for each in ranks.stores), time.monotonic()
    time.sleep(PERIODS * LONGEST_PERIOD_S)
    periods = (time.monotonic() - start) / LONGEST_PERIOD_S
    requests = (sum(each.requests for each in ranks.stores) - before) / periods
    victim = ranks.num_ranks - 3
    beats[victim]._end.set()
    beats[victim]._threads[0].join()
    died = time.monotonic()
    living = [each for each in beats if each is not beats[victim]]
    if loses_connections:
        ends: list[tuple[float, str]] = []

        def lose(each: Watched) -> None:
            found = each.missing_ranks(RuntimeError("Connection closed by peer"))
            ends.append((time.monotonic(), str(found)))

        threads = [threading.Thread(target=lose, args=(beats[victim + i],)) for i in (-1, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    else:
        while any(each.ended is None for each in living) and time.monotonic() < died + 120:
            time.sleep(0.05)
        ends = [each.ended for each in living if each.ended is not None]
        assert len(ends) == len(living), "some ranks never learned of it"
    assert all(f"rank {victim} on " in text for _, text in ends), ends[0]
    for each in beats:
        each._end.set()
    first, last = (f(when - died for when, _ in ends) for f in (min, max))
    case = "connections lost" if loses_connections else "silent"
    return (
        f"{ranks.num_ranks:>5} ranks, {case:<17}: rank {victim} named after {first:.1f} to "
        f"{last:.1f} s by {len(ends):>4} ranks; {requests:,.0f} requests a period"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 512, 1024])
    arguments = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for num_ranks in arguments.ranks:
        ranks = Ranks(num_ranks)
        for loses_connections in (False, True):
            print(measure(ranks, loses_connections=loses_connections), flush=True)
    os._exit(0)  # the threads need not end


if __name__ == "__main__":
    main()
