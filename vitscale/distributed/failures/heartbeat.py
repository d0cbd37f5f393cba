"""Detect and name hung, dead and failed ranks, and end all ranks when one fails.

Owns: the heartbeat of each rank, the watch of rank 0 over all of them and of each rank over its
neighbour's process, and what a rank reports when it fails.
Leaves out: what heartbeats mean (`heartbeat_table`), the record of failures (`events`), ending a
process (`ending`), collectives (`distributed`, `engine`), whose own timeouts name no rank.

A thread of every rank writes heartbeats to the store and reads one key, in which rank 0 says that
it is alive or what has happened; rank 0 reads the heartbeats of all in one request. So a period
costs the store two requests of each rank. A rank that fails reports why in a heartbeat at once,
before anything is closed. A killed process is seen by the next rank of its node; a stopped one, and
a dead node, by their silence. A live process whose loop or device hangs has reached fewer `mark`s
than the others.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from vitscale.config.errors import FailureKind, RankError, UserError
from vitscale.distributed.failures.ending import EXIT_S, end_now, end_within
from vitscale.distributed.failures.events import Failure, record_failure
from vitscale.distributed.failures.heartbeat_table import (
    ENDED,
    LOST,
    REPORTS,
    RUNNING,
    Beat,
    Silence,
    failure_to_json,
)
from vitscale.distributed.failures.kinds import is_connection_lost, kind_and_text
from vitscale.distributed.failures.marks import Event, Marks, collectives_begun, recorder
from vitscale.distributed.failures.neighbour import Neighbour
from vitscale.distributed.failures.watch import FirstRankWatch, OtherRankWatch, beat_key
from vitscale.distributed.key_value_store import wait_for
from vitscale.distributed.processes import node_name
from vitscale.distributed.world import World, process_group

LONGEST_PERIOD_S = 3.0
# Of ranks that have ended and wait for the others.
SHORTEST_PERIOD_S, S_PER_RANK = 0.05, 0.002
# How often a rank looks whether its neighbour's process is there.
LOOK_S = 1.0
# A node without power is named within a minute, whatever the time-out of collectives.
LONGEST_SILENCE_S = 45.0
# Shorter than the timeout of collectives, which names no rank.
SHARE_OF_TIMEOUT = 0.7
CHECKS_PER_TIMEOUT = 10
# For the others to read what rank 0 has found, before its store ends.
PERIODS_TO_READ = 1.5
# How long a rank that lost a peer waits for rank 0 to name it.
PERIODS_TO_FIND = 4
# How long a failing rank waits for its last heartbeat to be sent.
SEND_S = 1.0
# Ranks that record a peer that was lost without a name.
MOST_RECORDS = 8
# Requests in a row that fail at once when rank 0's process is gone.
FAILED_REQUESTS = 3
NOBODY = "no rank is missing"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Heartbeat:
    """Exchange heartbeats of all ranks inside the block."""

    def __init__(
        self,
        world: World,
        *,
        timeout_min: float,
        folder: Path | None = None,
        say: Callable[[str], None] = _say,
        record: Callable[[], Event] | None = None,
    ) -> None:
        """folder: of the run, where failures are recorded.

        record: mark the present point in the work of this rank's device.
        """
        self.world, self.say, self.folder = world, say, folder
        self.step: int | None = None
        """Steps that this rank has done."""
        self.silence_s = timeout_min * 60 * SHARE_OF_TIMEOUT
        self.dead_s = min(self.silence_s, LONGEST_SILENCE_S)
        self.period_s = min(LONGEST_PERIOD_S, self.silence_s / CHECKS_PER_TIMEOUT)
        self._num_beats, self._answers = 0, 0
        self._marks = Marks(record or recorder(world.device))
        self._state, self._node = RUNNING, node_name()
        self._failure: Failure | None = None
        """What this rank reports."""
        self._first_node = ""
        """Of rank 0."""
        self._is_failing = False
        """Whether this rank ends by an error that it raised."""
        self._end, self._due, self._sent = (threading.Event() for _ in range(3))
        self._all_ended = threading.Event()
        self._found_any, self._found = threading.Event(), ""
        self._sending = threading.Lock()
        self._neighbour = Neighbour(world)
        # Two: the one that uses the store blocks while rank 0 is stopped.
        self._threads = [
            threading.Thread(target=target, name=f"heartbeat-{number}", daemon=True)
            for number, target in enumerate((self._beat, self._watch))
        ]

    def mark(self, doing: str) -> None:
        """Record progress of the loop; every rank makes the same marks in the same order."""
        if self.world.store is not None:
            self._marks.add(doing)

    def __enter__(self) -> Heartbeat:
        if self.world.store is not None:
            self._neighbour.announce()
            self._send()
            if not self.world.is_first:
                self._first_node = self._node_of_first()
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
        if not self._is_failing:
            # Together: until then each looks after its neighbour.
            self._state = ENDED
            self._due.set()
            while self._threads[0].is_alive() and not self._all_ended.wait(LOOK_S):
                pass
        elif self.world.is_first and self._failure is not None:
            time.sleep(PERIODS_TO_READ * self.period_s)  # the others read it from this process
        self._end.set()
        self._due.set()
        # Not for ever, since the store does not answer while rank 0 is stopped.
        self._threads[0].join(timeout=SEND_S)

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Report an error that leaves the block to the other ranks, before anything is closed.

        The process then ends within `EXIT_S`. To be the innermost block of a run.
        """
        try:
            yield
        except (SystemExit, GeneratorExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Report that this rank ends by an error. Nothing may wait for other ranks after it."""
        kind, text = kind_and_text(error)
        if self.missing_ranks(error) is not None:
            error.add_note(self._found or NOBODY)
            kind = FailureKind.PEER_LOST
        end_within(EXIT_S, exit_code=kind.exit_code)
        self._is_failing = True
        failure = self._own_failure(kind, f"ended with an error: {text}")
        if kind is not FailureKind.PEER_LOST:
            self._report(failure)
        if self._should_record(error, kind):
            self._record_failure(failure)

    def _should_record(self, error: BaseException, kind: FailureKind) -> bool:
        """One rank, or few, where all fail in the same way."""
        if kind is FailureKind.PEER_LOST:
            return not self._found and self.world.rank < MOST_RECORDS
        is_agreed = isinstance(error, UserError) and not isinstance(error, RankError)
        return self.world.is_first or not is_agreed

    def missing_ranks(self, error: BaseException | None) -> str | None:
        """Name the ranks that are gone, after a collective failed on this one with `error`.

        Waits some periods. None if the error is another, `NOBODY` if no rank is missing.
        """
        if self.world.store is None or not is_connection_lost(error):
            return None
        if self._state != LOST:
            self._state = LOST
            self._due.set()
            if self._found_any.wait(PERIODS_TO_FIND * self.period_s) and self.world.is_first:
                time.sleep(PERIODS_TO_READ * self.period_s)
        return self._found or NOBODY

    def _own_failure(self, kind: FailureKind, what: str) -> Failure:
        rank = self.world.rank
        return Failure(
            kind=kind,
            what=f"rank {rank} on {self._node} {what}",
            rank=rank,
            node=self._node,
            step=self.step,
            reported_by=rank,
        )

    def _report(self, failure: Failure) -> None:
        """Send a failure to rank 0 at once, as far as the store answers."""
        self._failure = failure
        if self._threads[0].is_alive():
            self._sent.clear()
            self._due.set()
            self._sent.wait(SEND_S)

    def _record_failure(self, failure: Failure) -> None:
        if self.folder is None:
            return
        thread = threading.Thread(target=record_failure, args=(self.folder, failure), daemon=True)
        thread.start()
        thread.join(SEND_S)

    # --- the threads -----------------------------------------------------------------------------

    def _watch(self) -> None:
        """Check that the store still answers this rank, and that its neighbour is there."""
        silence, looked = Silence(self.period_s), 0.0
        while not self._end.wait(min(LOOK_S, self.period_s)):
            if self._neighbour.is_gone():
                if self._neighbour.rank == 0:  # it ends after all others, and its store with it
                    self._receive(self._killed_neighbour())
                else:
                    self._due.set()
            now = time.monotonic()
            if now - looked < self.period_s:
                continue
            looked = now
            if silence.seconds(self._answers, now=now) > self.dead_s + self.period_s:
                self._lose_store(
                    "was stopped or killed, or its node is gone: its key-value store has not "
                    f"answered for {self.dead_s:.0f} s",
                )

    def _killed_neighbour(self) -> Failure:
        rank = self._neighbour.rank
        self._neighbour.forget()
        return Failure(
            kind=FailureKind.KILLED,
            what=f"rank {rank} on {self._node} was killed or exited: its process is gone",
            rank=rank,
            node=self._node,
            step=self.step,
            reported_by=self.world.rank,
        )

    def _look_at_neighbour(self) -> None:
        """Report a neighbour that ended without a word; rank 0 tells it to all, this rank too."""
        assert self.world.store is not None
        if self._neighbour.needs_address:
            self._neighbour.read_address()
        if self._failure is not None or not self._neighbour.is_gone():
            return
        beat = Beat.parse(self.world.store.get(beat_key(self._neighbour.rank)).decode())
        if beat.state in (ENDED, REPORTS):
            self._neighbour.forget()
        else:
            self._failure = self._killed_neighbour()

    def _lose_store(self, what: str) -> None:
        failure = Failure(
            kind=FailureKind.KILLED,
            what=f"rank 0 on {self._first_node} {what}",
            rank=0,
            node=self._first_node,
            step=self.step,
            reported_by=self.world.rank,
        )
        self._receive(failure)

    def _node_of_first(self) -> str:
        """The node of rank 0; its address if it sends no heartbeat."""
        store, size = self.world.store, self.world.world_size
        assert store is not None
        with suppress(RuntimeError):
            said = wait_for(store, beat_key(0), world_size=size, timeout_s=self.dead_s)
            return Beat.parse(said.decode()).node
        return os.environ["MASTER_ADDR"]

    def _beat(self) -> None:
        """Send heartbeats, and read what rank 0 says or find it."""
        if self.world.device.type == "cuda":
            torch.cuda.set_device(self.world.device)  # or the thread would use GPU 0
        watch = FirstRankWatch if self.world.is_first else OtherRankWatch
        others = watch(
            self.world, period_s=self.period_s, dead_s=self.dead_s, late_s=self.silence_s
        )
        soon_s = min(self.period_s, max(SHORTEST_PERIOD_S, self.world.world_size * S_PER_RANK))
        is_over, num_failed = False, 0
        while not is_over:
            self._due.wait(soon_s if self._state == ENDED else self.period_s)
            self._due.clear()
            is_over = self._end.is_set()
            try:
                assert self.world.store is not None
                self._look_at_neighbour()
                self._send()
                failure = None if is_over else others.look()
            except RuntimeError as error:  # the connection is lost, or there was no answer
                num_failed += 1
                if self._state == LOST or (
                    num_failed >= FAILED_REQUESTS and is_connection_lost(error)
                ):
                    what = "was killed or exited: its key-value store is gone"
                    self._lose_store(what)
                continue
            self._answers, num_failed = self._answers + 1, 0
            if failure is not None:
                self._receive(failure)
            elif others.all_ended:
                self._all_ended.set()

    def _send(self) -> None:
        """Send a heartbeat. An older one of another thread never comes after it."""
        assert self.world.store is not None
        with self._sending:
            self.world.store.set(beat_key(self.world.rank), self._own_beat().text())
        self._sent.set()

    def _own_beat(self) -> Beat:
        """This rank's next heartbeat."""
        reached, doing = self._marks.reached()
        num_collectives = collectives_begun()
        self._num_beats += 1
        state = self._state
        if self._failure is not None:
            state, doing = REPORTS, failure_to_json(self._failure)
        return Beat(self._num_beats, reached, num_collectives, state, self._node, doing)

    def _receive(self, failure: Failure) -> None:
        """End this process because of a failure elsewhere, unless it ends by itself."""
        if self._found or (failure.reported_by == self.world.rank and self._is_failing):
            return
        # The others may not be able to: the culprit is killed, or its disk is gone.
        if self.world.is_first or (failure.rank == 0 and self.world.rank == 1):
            self._record_failure(failure)
        if self._state == LOST:
            # The loop waits for it, after a collective failed.
            self._found = failure.text
            self._found_any.set()
            return
        if self._is_failing:
            return
        if self.world.is_first:
            self._end.wait(PERIODS_TO_READ * self.period_s)
        self._stop(failure)

    def _stop(self, failure: Failure) -> None:
        """End the process, whose loop may hang in a collective and cannot raise."""
        if self._end.is_set():
            return
        with suppress(OSError):
            self.say(
                f"error: rank {self.world.rank}: {failure.text}\n"
                "  next: check that rank's node and output; run the same command again to resume "
                "from the newest checkpoint (engine.timeout_min is how long ranks wait)"
            )
        if failure.kind in (FailureKind.HANG, FailureKind.PEER_LOST):
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        end_now(failure.kind.exit_code)


@contextmanager
def watched_ranks(folder: Path | None, timeout_min: float, **settings: Any) -> Iterator[World]:
    """`process_group` with a heartbeat that reports what leaves the block.

    folder: where failures are recorded. settings: of the process group.
    """
    with (
        process_group(timeout_min=timeout_min, **settings) as world,
        Heartbeat(world, timeout_min=timeout_min, folder=folder) as heartbeat,
        heartbeat.reporting(),
    ):
        yield world
