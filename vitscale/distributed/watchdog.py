"""Detect and name ranks that failed, died or hang, and end all others.

Owns: the heartbeat of each rank, who is silent or behind, and what a rank reports when it fails.
Leaves out: the record of failures (`events`), ending a process (`exit`), collectives, whose own
timeouts name no rank.

Once a period, a thread of each rank writes a heartbeat to the key-value store of rank 0 and reads
one key there: the failure that ends the run. A rank that raises an error writes that key. The first
two ranks read all heartbeats, and write it for a rank that is silent or behind. The first failure
counts, and all end. Time is counted in periods of the rank that waits, so a job that was suspended
finds nobody silent.
"""

from __future__ import annotations

import faulthandler
import json
import re
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from vitscale.config.errors import FailureKind, PeerLostError, RankError, UserError
from vitscale.distributed.events import Failure, parsed, record_failure
from vitscale.distributed.exit import EXIT_S, end_now, end_within
from vitscale.distributed.processes import node_name
from vitscale.distributed.world import HERE, SAVES, World, process_group

LONGEST_PERIOD_S = 3.0
# A node without power is named within a minute, whatever the timeout of collectives.
LONGEST_SILENCE_S = 45.0
# Shorter than the timeout of collectives, which names no rank.
SHARE_OF_TIMEOUT = 0.7
CHECKS_PER_TIMEOUT = 10
# Without a heartbeat of a rank, or an answer of the store, once a connection is lost.
PERIODS_TO_CONFIRM = 2
# How long a rank that lost a peer waits for the name of the one that failed.
PERIODS_TO_FIND = 5
# For the others to read the failure before the store of rank 0 ends.
PERIODS_TO_READ = 1.5
# How long a failing rank waits for its report to be sent and recorded.
SEND_S = 1.0
# Two, since one may be the rank that is gone.
FIRST_RANKS = 2
FAILURE = "vitscale/failure"
MOST_NAMED = 4
# How gloo, NCCL and the store say that a peer is gone.
CONNECTION_LOST = re.compile(
    r"[Cc]onnection|[Tt]imed out|[Tt]imeout|Broken pipe|got 0 bytes|remote process exited"
)
DEVICE_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError)


class Beat(NamedTuple):
    """One heartbeat of one rank."""

    number: int
    """Count of heartbeats that the rank has sent."""
    marks: int
    """That the rank has reached: its loop, and its device, too."""
    collectives: int
    """That the rank has begun; fewer if the others wait for it between two marks."""
    doing: str
    """Since the mark that it has reached."""
    has_lost: bool
    """Whether a collective failed because a peer is gone."""
    ended: bool
    """Whether it came to its planned end."""

    @property
    def progress(self) -> tuple[int, int]:
        return self.marks, self.collectives


class Watchdog:
    """Exchange heartbeats of all ranks inside the block."""

    def __init__(self, world: World, *, timeout_min: float, folder: Path | None = None) -> None:
        """folder: of the run, where failures are recorded."""
        self.world, self.folder = world, folder
        self.step: int | None = None
        """Steps that this rank has done."""
        self.late_s = timeout_min * 60 * SHARE_OF_TIMEOUT
        self.dead_s = min(self.late_s, LONGEST_SILENCE_S)
        self.period_s = min(LONGEST_PERIOD_S, self.late_s / CHECKS_PER_TIMEOUT)
        # Marks that the device has not reached yet.
        self._ahead: deque[tuple[int, str, torch.cuda.Event | None]] = deque()
        self._num_marks, self._reached = 0, (0, "starting")
        self._num_beats = self._unanswered = 0
        self._has_lost = self._is_failing = self._is_store_lost = False
        # What the first ranks know: the last heartbeat of each rank and, in periods, how long it is
        # the last, and how long no rank made progress.
        self._beats: list[Beat] = []
        self._silent: list[int] = [0] * world.world_size
        self._stalled = 0
        self._end = threading.Event()
        # Two: the one that uses the store blocks while rank 0 is stopped.
        self._threads = [
            threading.Thread(target=target, name=f"watchdog-{number}", daemon=True)
            for number, target in enumerate((self._run, self._watch_store))
        ]

    def mark(self, doing: str) -> None:
        """Record progress of the loop; every rank makes the same marks in the same order."""
        if self.world.store is None:
            return
        on_device = self.world.device.type == "cuda"
        event = torch.cuda.current_stream().record_event() if on_device else None
        self._num_marks += 1
        self._ahead.append((self._num_marks, doing, event))

    def __enter__(self) -> Watchdog:
        if self.world.store is not None:
            self._first_node = self._node(0)
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.world.store is None:
            return
        if self._is_failing and self.world.is_first:
            self._end.wait(PERIODS_TO_READ * self.period_s)
        self._end.set()
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
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """Report that this rank ends by an error. Nothing may wait for other ranks after it."""
        kind, text = kind_and_text(error)
        if self.world.store is not None and is_connection_lost(error):
            kind, self._has_lost = FailureKind.PEER_LOST, True
            # The thread ends this process when it knows who failed.
            self._end.wait(PERIODS_TO_FIND * self.period_s)
            error.add_note("no rank is missing")
        end_within(EXIT_S, exit_code=kind.exit_code)
        self._is_failing = True
        is_agreed = isinstance(error, UserError) and not isinstance(error, RankError)
        if is_agreed and not self.world.is_first:
            return  # the first rank says it
        rank = self.world.rank
        what = f"rank {rank} on {node_name()} ended with an error: {text}"
        self._tell(self._failure(kind, what, rank, node_name()))

    def _failure(self, kind: FailureKind, what: str, rank: int, node: str) -> Failure:
        return Failure(
            kind=kind, what=what, rank=rank, node=node, step=self.step, reported_by=self.world.rank
        )

    def _tell(self, failure: Failure) -> Failure:
        """Tell all ranks of a failure and record it, unless they know another; returns that one."""
        text = json.dumps(failure.values())
        told = text.encode()
        if self.world.store is not None:
            with suppress(RuntimeError):  # rank 0 is gone
                told = self.world.store.compare_set(FAILURE, "", text)
        if told.decode() == text:
            self._record(failure)
        return parsed(Failure, json.loads(told))

    def _record(self, failure: Failure) -> None:
        """Record a failure, unless storage hangs."""
        if self.folder is not None:
            thread = threading.Thread(target=record_failure, args=(self.folder, failure))
            thread.daemon = True
            thread.start()
            thread.join(SEND_S)

    # --- the threads -----------------------------------------------------------------------------

    def _run(self) -> None:
        """Send heartbeats, read what others have found, and find what they have not."""
        if self.world.device.type == "cuda":
            torch.cuda.set_device(self.world.device)  # or the thread would use GPU 0
        is_over = False
        while not is_over:
            is_over = self._end.is_set()
            found = None
            try:
                self._send(ended=is_over and not self._is_failing)
                if not (is_over or self._is_failing):
                    found = self._read() or self._find()
                self._unanswered = 0
            except RuntimeError:
                self._is_store_lost = True
            if found is not None:
                self._stop(found)
            self._end.wait(self.period_s)

    def _watch_store(self) -> None:
        """End this rank if the store of rank 0 is gone or does not answer."""
        while not self._end.wait(self.period_s):
            self._unanswered += 1
            if self._is_store_lost and self._unanswered > PERIODS_TO_CONFIRM:
                what = "was killed or exited: its key-value store is gone"
            elif (self._unanswered - 1) * self.period_s > self.dead_s:
                what = "was stopped or killed, or its node is gone: its key-value store has not "
                what += f"answered for {self.dead_s:.0f} s"
            else:
                continue
            node, world = self._first_node, self.world
            failure = self._failure(FailureKind.KILLED, f"rank 0 on {node} {what}", 0, node)
            if not self._is_failing and (world.rank < FIRST_RANKS or world.local_rank == 0):
                self._record(failure)
            self._stop(failure)

    @property
    def _store(self) -> dist.Store:
        assert self.world.store is not None
        return self.world.store

    def _node(self, rank: int) -> str:
        return self._store.get(f"{HERE}/{rank}").decode()

    def _send(self, *, ended: bool) -> None:
        with suppress(RuntimeError):  # the device has failed, and with it the loop
            while self._ahead and (self._ahead[0][2] is None or self._ahead[0][2].query()):
                number, doing, _ = self._ahead.popleft()
                self._reached = number, doing
        self._num_beats += 1
        beat = Beat(
            number=self._num_beats,
            marks=self._reached[0],
            collectives=collectives_begun(),
            doing=self._reached[1],
            has_lost=self._has_lost,
            ended=ended,
        )
        self._store.set(f"vitscale/beats/{self.world.rank}", json.dumps(beat))

    def _read(self) -> Failure | None:
        """The failure that ends the run, as another rank has found it."""
        if not self._store.check([FAILURE]):
            return None
        return parsed(Failure, json.loads(self._store.get(FAILURE)))

    def _find(self) -> Failure | None:
        """Find ranks that are silent or behind, and tell the others."""
        keys = [f"vitscale/beats/{rank}" for rank in range(self.world.world_size)]
        if self.world.rank >= FIRST_RANKS or not self._store.check(keys):
            return None
        beats = [Beat(*json.loads(text)) for text in self._store.multi_get(keys)]
        before, self._beats = self._beats, beats
        pairs = zip(before, beats, strict=False)  # there are none before the first time
        for rank, (old, new) in enumerate(pairs):
            is_silent = old.number == new.number and not new.ended
            self._silent[rank] = self._silent[rank] + 1 if is_silent else 0
        is_stalled = [old.progress for old in before] == [new.progress for new in beats]
        self._stalled = self._stalled + 1 if is_stalled else 0
        failure = self._silent_rank() or self._rank_behind()
        return failure and self._tell(failure)

    def _silent_rank(self) -> Failure | None:
        wait_s = self.dead_s
        what = f"has sent no heartbeat for {wait_s:.0f} s: stopped or killed, or its node is gone"
        if any(beat.has_lost for beat in self._beats):
            wait_s = PERIODS_TO_CONFIRM * self.period_s
            what = f"was killed or exited: it sent no heartbeat for {wait_s:.0f} s"
        gone = [rank for rank, num in enumerate(self._silent) if num * self.period_s >= wait_s]
        return self._named(FailureKind.KILLED, what, gone)

    def _rank_behind(self) -> Failure | None:
        """The ranks that the others wait for; None when all have reached the same."""
        if self._stalled * self.period_s < self.late_s:
            return None
        present = {rank: beat for rank, beat in enumerate(self._beats) if not beat.ended}
        least = min(beat.progress for beat in present.values())
        late = [rank for rank, beat in present.items() if beat.progress == least]
        if len(late) == self.world.world_size:
            return None  # all in the same collective, or none in any; collectives have timeouts
        doing = ", ".join(sorted({present[rank].doing for rank in late}))
        what = f"has kept the others waiting for {self.late_s:.0f} s ({doing})"
        return self._named(FailureKind.HANG, what, late)

    def _named(self, kind: FailureKind, what: str, ranks: Sequence[int]) -> Failure | None:
        if not ranks:
            return None
        nodes = [self._node(rank) for rank in ranks[:MOST_NAMED]]
        who = ", ".join(f"rank {rank} on {node}" for rank, node in zip(ranks, nodes, strict=False))
        if len(ranks) > MOST_NAMED:
            who += f" and {len(ranks) - MOST_NAMED} more ranks"
        return self._failure(kind, f"{who} {what}", ranks[0], nodes[0])

    def _stop(self, failure: Failure) -> None:
        """End the process, whose loop may hang in a collective and cannot raise."""
        if self.world.is_first:
            self._end.wait(PERIODS_TO_READ * self.period_s)
        if self._end.is_set() or self._is_failing:
            return
        with suppress(OSError):
            text = (
                f"error: rank {self.world.rank}: {failure.text}\n"
                "  next: check that rank's node and output; run the same command again to resume "
                "from the newest checkpoint (engine.timeout_min is how long ranks wait)"
            )
            print(text, file=sys.stderr, flush=True)
        if failure.kind in (FailureKind.HANG, FailureKind.PEER_LOST):
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        end_now(failure.kind.exit_code)


def collectives_begun() -> int:
    """How many collectives this process has begun, over all groups but that of saves.

    0 where torch does not say.
    """
    with suppress(AttributeError, RuntimeError):
        groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
        groups = [group for group in groups if group.group_desc != SAVES]
        return sum(group._get_sequence_number_for_group() for group in groups)
    return 0


def is_connection_lost(error: BaseException) -> bool:
    """Whether a collective or the store failed because another process is gone."""
    return isinstance(error, PeerLostError) or (
        isinstance(error, RuntimeError) and bool(CONNECTION_LOST.search(str(error)))
    )


def kind_and_text(error: BaseException) -> tuple[FailureKind, str]:
    """The kind of an error, and its first line."""
    if isinstance(error, UserError):
        where = f"{error.where}: " if error.where else ""
        return error.kind, where + error.what.splitlines()[0]
    lines = str(error).splitlines() or [""]
    text = f"{type(error).__name__}: {lines[0]}".rstrip(": ")
    if isinstance(error, DEVICE_ERRORS):
        return FailureKind.DEVICE, text
    if is_connection_lost(error):
        return FailureKind.PEER_LOST, text
    if isinstance(error, OSError):
        return FailureKind.STORAGE, text
    return FailureKind.OTHER, text


@contextmanager
def watched_ranks(folder: Path | None, timeout_min: float, **settings: Any) -> Iterator[World]:
    """`process_group` with a watchdog that reports what leaves the block.

    folder: where failures are recorded. settings: of the process group.
    """
    with (
        process_group(timeout_min=timeout_min, **settings) as world,
        Watchdog(world, timeout_min=timeout_min, folder=folder) as watchdog,
        watchdog.reporting(),
    ):
        yield world
