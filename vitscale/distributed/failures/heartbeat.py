"""Detect and name hung or dead ranks.

Owns: the heartbeat of each rank, the watch of rank 0 over all of them, and ending the process.
Leaves out: what heartbeats mean (`heartbeat_table`), collectives (`distributed`, `engine`), whose
own timeouts name no rank.

A thread of every rank writes heartbeats to the store and reads one key, in which rank 0 says that
it is alive or what has happened; rank 0 reads the heartbeats of all in one request. So a period
costs the store two requests of each rank. A stopped or dead process writes no more heartbeats. A
live process whose loop or device hangs has reached fewer `mark`s than the others.
"""

from __future__ import annotations

import faulthandler
import os
import re
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

import torch

from vitscale.distributed.failures.heartbeat_table import (
    ENDED,
    FAILED,
    GAVE_UP,
    LOST,
    RUNNING,
    Beat,
    HeartbeatTable,
    Silence,
)
from vitscale.distributed.world import World

LONGEST_PERIOD_S = 3.0
# A rank is named within a minute of its last heartbeat, whatever the time-out of collectives.
LONGEST_SILENCE_S = 45.0
# Shorter than the timeout of collectives, which names no rank.
SHARE_OF_TIMEOUT = 0.7
CHECKS_PER_TIMEOUT = 10
# For the others to read what rank 0 has found, before its store ends.
PERIODS_TO_READ = 1.5
PERIODS_TO_FIND = 6
# How gloo, NCCL and the store say that a peer is gone.
CONNECTION_LOST = re.compile(r"[Cc]onnection|[Tt]imed out|[Tt]imeout")
NOBODY = "no rank is missing"
WATCH, BEATS = "vitscale/watch", "vitscale/beats"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Event(Protocol):
    """A point in the work of a device, such as torch.cuda.Event."""

    def query(self) -> bool:
        """Whether the device has reached it. Does not wait."""
        ...


class _Reached:
    """On CPU, where work is done when its call returns."""

    def query(self) -> bool:
        return True


def _recorder(device: torch.device) -> Callable[[], Event]:
    if device.type == "cuda":
        return lambda: torch.cuda.current_stream().record_event()
    return _Reached


class Heartbeat:
    """Exchange heartbeats of all ranks inside the block."""

    def __init__(
        self,
        world: World,
        *,
        timeout_min: float,
        say: Callable[[str], None] = _say,
        record: Callable[[], Event] | None = None,
    ) -> None:
        """record: mark the present point in the work of this rank's device."""
        self.world, self.say = world, say
        self.silence_s = timeout_min * 60 * SHARE_OF_TIMEOUT
        self.dead_s = min(self.silence_s, LONGEST_SILENCE_S)
        self.period_s = min(LONGEST_PERIOD_S, self.silence_s / CHECKS_PER_TIMEOUT)
        self._record = record or _recorder(world.device)
        self._marks, self._num_beats, self._answers = 0, 0, 0
        self._ahead: deque[tuple[int, str, Event]] = deque()
        self._reached, self._doing = 0, "starting"
        self._state, self._node = RUNNING, socket.gethostname()
        self._end, self._found_any, self._found = threading.Event(), threading.Event(), ""
        # Two: the one that uses the store blocks while rank 0 is stopped.
        self._threads = [
            threading.Thread(target=target, name=f"heartbeat-{number}", daemon=True)
            for number, target in enumerate((self._beat, self._watch))
        ]

    def mark(self, doing: str) -> None:
        """Record progress of the loop; every rank makes the same marks in the same order."""
        if self.world.store is not None:
            self._marks += 1
            self._ahead.append((self._marks, doing, self._record()))

    def __enter__(self) -> Heartbeat:
        if self.world.store is not None:
            self.world.store.set(self._key(self.world.rank), self._own_beat().text())
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.world.store is None:
            return
        found = self.missing_ranks(error)
        if error is not None and found is not None:
            error.add_note(found)
        planned = error is None or isinstance(error, SystemExit)
        self._state = ENDED if planned else FAILED
        self._end.set()
        # Its last heartbeat; not for ever, since the store does not answer while rank 0 is stopped.
        self._threads[0].join(timeout=1.0)

    def missing_ranks(self, error: BaseException | None) -> str | None:
        """Name the ranks that are gone, after a collective failed on this one with `error`.

        Waits some periods. None if the error is another, `NOBODY` if no rank is missing.
        """
        lost = isinstance(error, RuntimeError) and CONNECTION_LOST.search(str(error))
        if self.world.store is None or not lost:
            return None
        if self._state != LOST:
            self._state = LOST
            if self._found_any.wait(PERIODS_TO_FIND * self.period_s) and self.world.is_first:
                time.sleep(PERIODS_TO_READ * self.period_s)
        return self._found or NOBODY

    # --- the threads -----------------------------------------------------------------------------

    def _watch(self) -> None:
        """Check that the store still answers this rank."""
        silence = Silence(self.period_s)
        while not self._end.wait(self.period_s):
            if silence.seconds(self._answers, now=time.monotonic()) > self.dead_s + self.period_s:
                self._report(
                    f"the key-value store on rank 0 ({os.environ['MASTER_ADDR']}) has not answered "
                    f"for {self.dead_s:.0f} s: it was stopped or killed, or its node is gone"
                )

    def _beat(self) -> None:
        """Send heartbeats, and read what rank 0 says or find it."""
        if self.world.device.type == "cuda":
            torch.cuda.set_device(self.world.device)  # or the thread would use GPU 0
        look = self._look_at_all() if self.world.is_first else self._look_at_first()
        is_over = False
        while not is_over:
            is_over = self._end.wait(self.period_s)
            try:
                assert self.world.store is not None
                self.world.store.set(self._key(self.world.rank), self._own_beat().text())
                problem = look(is_over)
            except RuntimeError:  # rank 0 may just have ended; `_watch` counts the time
                if self._state == LOST:
                    self._tell("the key-value store on rank 0 is gone; read the output of rank 0")
                continue
            self._answers += 1
            if problem and not is_over:
                self._report(problem)

    def _look_at_all(self) -> Callable[[bool], str | None]:
        store, size = self.world.store, self.world.world_size
        assert store is not None
        keys = [self._key(rank) for rank in range(size)]
        table = HeartbeatTable(
            size, period_s=self.period_s, dead_s=self.dead_s, late_s=self.silence_s
        )

        def look(is_over: bool) -> str | None:
            if is_over or not store.check(keys):
                store.set(WATCH, f"{ENDED if is_over else self._num_beats}\t")
                return None
            beats = [Beat.parse(each.decode()) for each in store.multi_get(keys)]
            problem = table.problem(beats, now=time.monotonic())
            store.set(WATCH, f"{self._num_beats}\t{problem or ''}")
            return problem

        return look

    def _look_at_first(self) -> Callable[[bool], str | None]:
        store = self.world.store
        assert store is not None
        silence = Silence(self.period_s)

        def look(is_over: bool) -> str | None:
            if is_over or not store.check([WATCH]):
                return None
            number, _, problem = store.get(WATCH).decode().partition("\t")
            if problem or number == ENDED:
                return problem or None
            if silence.seconds(int(number), now=time.monotonic()) > self.dead_s:
                where = os.environ["MASTER_ADDR"]
                return f"rank 0 on {where} has sent no heartbeat for {self.dead_s:.0f} s"
            return None

        return look

    def _own_beat(self) -> Beat:
        """This rank's next heartbeat."""
        try:
            while self._ahead and self._ahead[0][2].query():
                self._reached, self._doing, _ = self._ahead.popleft()
        except RuntimeError:  # the device has failed, and with it the loop
            pass
        self._num_beats += 1
        return Beat(self._num_beats, self._reached, self._state, self._node, self._doing)

    @staticmethod
    def _key(rank: int) -> str:
        return f"{BEATS}/{rank}"

    def _tell(self, found: str) -> None:
        """Tell the loop, which waits for it after a collective failed."""
        self._found = self._found or found
        self._found_any.set()

    def _report(self, problem: str) -> None:
        if self._state == GAVE_UP:  # it says itself why
            return
        if self._state == LOST:
            self._tell(problem)
            return
        if self.world.is_first:
            self._end.wait(PERIODS_TO_READ * self.period_s)
        self._stop(problem)

    def give_up(self, what: str) -> None:
        """End the process because of what this rank found out about itself, and tell the others."""
        self._state, self._doing = GAVE_UP, what
        self._ahead.clear()
        # The thread sends it; it may not come to that.
        time.sleep(PERIODS_TO_READ * self.period_s)
        self._stop(what)

    def _stop(self, what: str) -> None:
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
