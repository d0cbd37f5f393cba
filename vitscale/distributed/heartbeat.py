"""Detect and name hung or dead ranks.

Owns: the heartbeat of each rank, watching those of the others, and the message that names a rank.
Leaves out: collectives (`distributed`, `engine`), whose own timeouts name no rank.

Threads of every rank write heartbeats to the store of the rendezvous and watch the next rank. A
stopped or dead process writes no more heartbeats. A live process whose loop hangs has a lower count
of `mark`s than the others.

Silence is the sum of the times between checks, each counted as two periods at most: after a whole
job was suspended (by its machine or SLURM), its ranks do not count as silent.
"""

from __future__ import annotations

import faulthandler
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType

import torch.distributed as dist

from vitscale.distributed.world import World

LONGEST_PERIOD_S = 5.0
# Shorter than the timeout of collectives, which names no rank.
SHARE_OF_TIMEOUT = 0.7
CHECKS_PER_TIMEOUT = 10
# How gloo and NCCL say that a peer is gone.
LOST = re.compile(r"[Cc]onnection|[Tt]imed out|[Tt]imeout")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class _Silence:
    """How long a number that should grow has been constant, checked about once a period."""

    def __init__(self, period_s: float) -> None:
        self.longest_s, self.number, self.checked, self.silent_s = 2 * period_s, -1, 0.0, 0.0

    def seconds(self, number: int) -> float:
        now = time.monotonic()
        self.silent_s += min(now - self.checked, self.longest_s)
        if number != self.number:
            self.silent_s = 0.0
        self.number, self.checked = number, now
        return self.silent_s


class Heartbeat:
    """Exchange heartbeats of all ranks inside the block."""

    def __init__(
        self, world: World, *, timeout_min: float, say: Callable[[str], None] = _say
    ) -> None:
        self.world, self.say = world, say
        self.silence_s = timeout_min * 60 * SHARE_OF_TIMEOUT
        self.period_s = min(LONGEST_PERIOD_S, self.silence_s / CHECKS_PER_TIMEOUT)
        self._marks, self._doing, self._answers = 0, "starting", 0
        self._end = threading.Event()
        # Two: the one that uses the store blocks while rank 0 is stopped.
        self._threads = [
            threading.Thread(target=target, name=f"heartbeat-{number}", daemon=True)
            for number, target in enumerate((self._beat, self._watch))
        ]

    def mark(self, doing: str) -> None:
        """Record progress of the loop; every rank makes the same marks in the same order."""
        self._marks, self._doing = self._marks + 1, doing

    def __enter__(self) -> Heartbeat:
        if self.world.world_size > 1:
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end.set()
        lost = isinstance(error, RuntimeError) and LOST.search(str(error))
        if error is not None and lost and self.world.world_size > 1:
            notes: list[str] = []
            finder = threading.Thread(
                target=lambda: notes.append(self._silent_ranks()), daemon=True
            )
            finder.start()
            finder.join(timeout=6 * self.period_s)
            error.add_note(notes[0] if notes else "the key-value store on rank 0 does not answer")

    def _silent_ranks(self) -> str:
        """Name the ranks whose heartbeat has stopped, after a collective failed on this one."""
        try:
            store = self._connect()
            keys = [f"{self._key(rank)}/beats" for rank in range(self.world.world_size)]
            before = [store.add(key, 0) for key in keys]
            time.sleep(2.5 * self.period_s)
            pairs = enumerate(zip(before, [store.add(key, 0) for key in keys], strict=True))
        except RuntimeError:
            return "the key-value store on rank 0 is gone; read the output of rank 0"
        # This rank's own thread has ended, and so have those of ranks that failed as this one did.
        silent = [str(rank) for rank, (a, b) in pairs if a == b and rank != self.world.rank]
        return f"no heartbeat from rank {', '.join(silent)}" if silent else "no rank is missing"

    # --- the threads -----------------------------------------------------------------------------

    def _watch(self) -> None:
        """Check that the store still answers this rank."""
        silence = _Silence(self.period_s)
        while not self._end.wait(self.period_s):
            if silence.seconds(self._answers) > self.silence_s + self.period_s:
                self.give_up(
                    f"the key-value store on rank 0 has not answered for {self.silence_s:.0f} s: "
                    "it was stopped or killed, or its node is gone"
                )

    def _beat(self) -> None:
        """Send heartbeats and check those of the next rank."""
        own, watched = self.world.rank, (self.world.rank + 1) % self.world.world_size
        of_rank, of_own_loop, store = _Silence(self.period_s), _Silence(self.period_s), None
        while not self._end.wait(self.period_s):
            try:
                store = store or self._connect()
                store.set(self._key(own), f"{self._marks} {self._doing}")
                store.add(f"{self._key(own)}/beats", 1)
                beats = store.add(f"{self._key(watched)}/beats", 0)
                waited_s = of_own_loop.seconds(self._marks)
                late = self._late_ranks(store) if waited_s >= self.silence_s else None
            except RuntimeError:  # rank 0 may just have ended; `_watch` counts the time
                store = None
                continue
            self._answers += 1
            if of_rank.seconds(beats) > self.silence_s:
                self.give_up(
                    f"rank {watched} has sent no heartbeat for {self.silence_s:.0f} s: it was "
                    "stopped or killed, or its node is gone"
                )
            if late:
                self.give_up(late)

    def _connect(self) -> dist.TCPStore:
        # A connection of its own: collectives may hold the other one while they wait.
        return dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=max(0.5, self.silence_s / CHECKS_PER_TIMEOUT)),
        )

    @staticmethod
    def _key(rank: int) -> str:
        return f"vitscale/life/{rank}"

    def _late_ranks(self, store: dist.TCPStore) -> str | None:
        """The ranks that the others wait for, in words; None when all are at the same mark."""
        keys = [self._key(rank) for rank in range(self.world.world_size)]
        if not store.check(keys):
            return None
        rows = [value.decode().split(" ", 1) for value in store.multi_get(keys)]
        fewest = min(int(marks) for marks, _ in rows)
        late = [
            f"rank {rank} ({doing})"
            for rank, (marks, doing) in enumerate(rows)
            if int(marks) == fewest
        ]
        # All at the same mark, in a long evaluation for example. Collectives have timeouts.
        if len(late) == len(rows):
            return None
        return f"the others have waited {self.silence_s:.0f} s for {', '.join(late)}"

    def give_up(self, what: str) -> None:
        """End the process, whose loop hangs in a collective or on a disk and cannot raise."""
        if self._end.is_set():
            return
        self.say(
            f"error: rank {self.world.rank}: {what}\n"
            "  next: check that rank's node and output; run the same command again to resume from "
            "the newest checkpoint (engine.timeout_min is how long ranks wait)"
        )
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        os._exit(1)
