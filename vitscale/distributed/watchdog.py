"""Detect and name ranks that failed, died or hang, and end all others.

Owns: the heartbeat of each rank, who is silent or behind, and what a rank reports when it fails.
Leaves out: the record of failures (`events`), ending a process (`exit`), collectives, whose own
timeouts name no rank.

Once a period, a thread of each rank writes a heartbeat to the key-value store and reads two keys:
the failure that ends the run, and the heartbeat of the next rank. A rank that fails, or finds
another one silent or behind, writes the failure; the first one counts, and all end. Time is counted
in periods of the rank that waits, so a job that was suspended finds nobody silent.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from vitscale.config.errors import FailureKind, PeerLostError, RankError, UserError
from vitscale.distributed.events import Failure, record_failure
from vitscale.distributed.exit import EXIT_S, end_now, end_within
from vitscale.distributed.processes import is_alive, node_name
from vitscale.distributed.world import World, process_group

LONGEST_PERIOD_S = 3.0
# A node without power is named within a minute, whatever the timeout of collectives.
LONGEST_SILENCE_S = 45.0
# Shorter than the timeout of collectives, which names no rank.
SHARE_OF_TIMEOUT = 0.7
CHECKS_PER_TIMEOUT = 10
# Without a heartbeat of a rank that others have lost.
PERIODS_TO_CONFIRM = 2
# How long a rank that lost a peer waits for the name of the one that failed.
PERIODS_TO_FIND = 3
# For the others to read the failure before the store of rank 0 ends.
PERIODS_TO_READ = 1.5
# How long a failing rank waits for its report to be sent, and to be recorded.
SEND_S = 1.0
# Ranks that read the heartbeats of all; the others wait for what these find.
FIRST_RANKS = 8
# In a row, without an answer, when rank 0 is gone.
FAILED_REQUESTS = 3
FAILURE = "vitscale/failure"
MOST_NODES, MOST_RANKS = 4, 16
# How gloo, NCCL and the store say that a peer is gone.
CONNECTION_LOST = re.compile(
    r"[Cc]onnection|[Tt]imed out|[Tt]imeout|Broken pipe|got 0 bytes|remote process exited"
)
# torch raises it for errors of CUDA since 2.8.
DEVICE_ERRORS = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))


class Beat(NamedTuple):
    """One heartbeat of one rank."""

    number: int
    """Of heartbeats that the rank has sent."""
    marks: int
    """That the rank has reached: its loop, and its device, too."""
    collectives: int
    """That the rank has begun; fewer if the others wait for it between two marks."""
    node: str
    pid: int
    processes: str
    """The same for ranks that see each other's processes."""
    doing: str
    """Since the mark that it has reached."""
    ended: bool
    """Whether it came to its planned end."""

    @property
    def progress(self) -> tuple[int, int]:
        return self.marks, self.collectives


class Still:
    """How often in a row a value was seen unchanged."""

    def __init__(self) -> None:
        self._value: Any = None
        self.times = 0

    def see(self, value: Any) -> int:
        self.times = self.times + 1 if value == self._value else 0
        self._value = value
        return self.times


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
        self._node, self._first_node = node_name(), os.environ.get("MASTER_ADDR", "")
        self._processes = f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"
        self._next = (world.rank + 1) % world.world_size
        self._is_first_ranks = world.rank < FIRST_RANKS
        # Marks that the device has not reached yet.
        self._ahead: deque[tuple[int, str, torch.cuda.Event | None]] = deque()
        self._num_marks, self._reached = 0, (0, "starting")
        self._num_beats = self._answers = 0
        self._own, self._others = Still(), Still()
        self._before: tuple[int, list[Beat]] | None = None
        """When this rank began to suspect others, and all heartbeats then."""
        self._report: Failure | None = None
        """What this rank still has to tell the others."""
        self._is_failing = self._is_lost = self._sees_all = False
        self._end, self._due, self._sent = (threading.Event() for _ in range(3))
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
            if self.world.is_first:
                self.world.store.compare_set(FAILURE, "", "")
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.world.store is None:
            return
        if self._is_failing and self.world.is_first:
            time.sleep(PERIODS_TO_READ * self.period_s)
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
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """Report that this rank ends by an error. Nothing may wait for other ranks after it."""
        kind, text = kind_and_text(error)
        if self.world.store is not None and is_connection_lost(error):
            kind, self._is_lost = FailureKind.PEER_LOST, True
            self._due.set()
            # The thread ends this process when it knows who failed.
            periods = PERIODS_TO_FIND + (PERIODS_TO_READ if self.world.is_first else 0)
            self._end.wait(periods * self.period_s)
            error.add_note("no rank is missing")
        end_within(EXIT_S, exit_code=kind.exit_code)
        self._is_failing, self._is_lost = True, False
        what = f"ended with an error: {text}"
        failure = self._failure(kind, what, rank=self.world.rank, node=self._node)
        is_agreed = isinstance(error, UserError) and not isinstance(error, RankError)
        if is_agreed and not self.world.is_first:
            return  # the first rank says it
        if self.world.store is None or not self._threads[0].is_alive():
            self._record(failure)
            return
        self._report = failure
        self._due.set()
        if not self._sent.wait(SEND_S):
            self._record(failure)

    def _failure(
        self, kind: FailureKind, what: str, *, rank: int, node: str, who: str | None = None
    ) -> Failure:
        """who: names all ranks that failed, of which `rank` is the first; None: only that one."""
        return Failure(
            kind=kind,
            what=f"{who or f'rank {rank} on {node}'} {what}",
            rank=rank,
            node=node,
            step=self.step,
            reported_by=self.world.rank,
        )

    def _named(
        self, kind: FailureKind, what: str, beats: Sequence[Beat], ranks: Sequence[int]
    ) -> Failure:
        rank, who = ranks[0], names(beats, ranks)
        return self._failure(kind, what, rank=rank, node=beats[rank].node, who=who)

    def _record(self, failure: Failure) -> None:
        if self.folder is None:
            return
        thread = threading.Thread(target=record_failure, args=(self.folder, failure), daemon=True)
        thread.start()
        thread.join(SEND_S)

    # --- the threads -----------------------------------------------------------------------------

    def _run(self) -> None:
        """Send heartbeats, read what others have found, and find what they have not."""
        if self.world.device.type == "cuda":
            torch.cuda.set_device(self.world.device)  # or the thread would use GPU 0
        num_failed, is_over = 0, False
        while not is_over:
            is_over = self._end.is_set()
            try:
                self._send(ended=is_over and not self._is_failing)
                found = self._report
                if found is None and not is_over and not self._is_failing:
                    found = self._read() or self._find()
                if found is not None:
                    self._tell(found)
            except RuntimeError as error:  # the connection is lost, or there was no answer
                num_failed += 1
                is_gone = num_failed >= FAILED_REQUESTS and is_connection_lost(error)
                if not is_over and (self._is_lost or is_gone):
                    self._lose_store("was killed or exited: its key-value store is gone")
            else:
                self._answers, num_failed = self._answers + 1, 0
            if not is_over:
                self._due.wait(self.period_s)
                self._due.clear()

    def _watch_store(self) -> None:
        """Check that the store still answers this rank."""
        still = Still()
        while not self._end.wait(self.period_s):
            if still.see(self._answers) * self.period_s > self.dead_s + self.period_s:
                self._lose_store(
                    "was stopped or killed, or its node is gone: its key-value store has not "
                    f"answered for {self.dead_s:.0f} s"
                )

    def _lose_store(self, what: str) -> None:
        failure = self._failure(FailureKind.KILLED, what, rank=0, node=self._first_node)
        if self._is_first_ranks and not self._is_failing:
            self._record(failure)
        self._stop(failure)

    @property
    def _store(self) -> dist.Store:
        assert self.world.store is not None
        return self.world.store

    def _send(self, *, ended: bool) -> None:
        with suppress(RuntimeError):  # the device has failed, and with it the loop
            while self._ahead and (self._ahead[0][2] is None or self._ahead[0][2].query()):
                number, doing, _ = self._ahead.popleft()
                self._reached = number, doing
        self._num_beats += 1
        marks, doing = self._reached
        beat = Beat(
            number=self._num_beats,
            marks=marks,
            collectives=collectives_begun(),
            node=self._node,
            pid=os.getpid(),
            processes=self._processes,
            doing=doing,
            ended=ended,
        )
        self._store.set(_key(self.world.rank), json.dumps(beat))
        self._own.see(beat.progress)

    def _read(self) -> Failure | None:
        """The failure that ends the run, as another rank has found it."""
        keys = [FAILURE, _key(self._next)]
        if not self._sees_all:
            self._sees_all = self._store.check([_key(0), *keys])
            if not self._sees_all:
                return None
            self._first_node = _parsed(self._store.get(_key(0))).node
        told, text = self._store.multi_get(keys)
        if told:
            return _failure_of(told)
        beat = _parsed(text)
        self._others.see((beat.number, beat.ended))
        if beat.ended:
            self._others.times = 0
        elif self._is_dead(beat):
            what, rank = "was killed or exited: its process is gone", self._next
            return self._failure(FailureKind.KILLED, what, rank=rank, node=beat.node)
        return None

    def _is_dead(self, beat: Beat) -> bool:
        """Whether the process of a rank of this node is gone, without a last word."""
        is_near = beat.processes == self._processes
        return is_near and not beat.ended and not is_alive(beat.pid)

    def _find(self) -> Failure | None:
        """Find ranks that are silent or behind."""
        silent_s = self._others.times * self.period_s
        if silent_s >= self.dead_s:
            what = f"has sent no heartbeat for {self.dead_s:.0f} s: it was stopped or killed, or "
            return self._silent(what + "its node is gone")
        if self._is_lost and self._is_first_ranks:
            return self._silent("sends no heartbeat any more")
        self._before = None
        waited_s = self._own.times * self.period_s
        grace_s = 0.0 if self._is_first_ranks else PERIODS_TO_FIND * self.period_s
        return self._behind() if waited_s >= self.late_s + grace_s else None

    def _silent(self, what: str) -> Failure | None:
        """The ranks without a heartbeat since this rank began to suspect them."""
        beats = self._all()
        if beats is None:
            return None
        gone = [rank for rank, beat in enumerate(beats) if self._is_dead(beat)]
        if gone:
            what = "was killed or exited: its process is gone"
        elif self._before is None:
            self._before = self._num_beats, beats
        elif self._num_beats - self._before[0] >= PERIODS_TO_CONFIRM:
            pairs = zip(self._before[1], beats, strict=True)
            gone = [rank for rank, (old, new) in enumerate(pairs) if old == new and not new.ended]
        if not gone:
            return None
        return self._named(FailureKind.KILLED, what, beats, gone)

    def _behind(self) -> Failure | None:
        """The ranks that the others wait for; None when all have reached the same."""
        beats = self._all()
        if beats is None:
            return None
        present = [rank for rank, beat in enumerate(beats) if not beat.ended]
        least = min(beats[rank].progress for rank in present)
        late = [rank for rank in present if beats[rank].progress == least]
        # All in the same collective, or none in any. Collectives have timeouts.
        if len(late) == len(beats):
            return None
        doing = ", ".join(sorted({beats[rank].doing for rank in late}))
        what = f"has kept the others waiting for {self.late_s:.0f} s ({doing})"
        return self._named(FailureKind.HANG, what, beats, late)

    def _all(self) -> list[Beat] | None:
        """The heartbeats of all ranks; None before each has sent one."""
        keys = [_key(rank) for rank in range(self.world.world_size)]
        if not self._store.check(keys):
            return None
        return [_parsed(text) for text in self._store.multi_get(keys)]

    def _tell(self, failure: Failure) -> None:
        """Tell all ranks of a failure, unless they know another, and end this process if it does
        not end by itself."""
        values = {key: value for key, value in asdict(failure).items() if value is not None}
        text = json.dumps(values)
        told = self._store.compare_set(FAILURE, "", text)
        self._report = None
        self._sent.set()
        if told.decode() == text and failure.reported_by == self.world.rank:
            self._record(failure)
        if self._is_failing:
            return
        if self.world.is_first:
            self._end.wait(PERIODS_TO_READ * self.period_s)
        self._stop(_failure_of(told))

    def _stop(self, failure: Failure) -> None:
        """End the process, whose loop may hang in a collective and cannot raise."""
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


def _key(rank: int) -> str:
    """Where the store has the newest heartbeat of a rank."""
    return f"vitscale/beats/{rank}"


def _parsed(text: bytes) -> Beat:
    return Beat(*json.loads(text))


def _failure_of(text: bytes) -> Failure:
    values = json.loads(text)
    return Failure(**values | {"kind": FailureKind(values["kind"])})


def boot_id() -> str:
    """The same for processes of one running machine."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return node_name()


def names(beats: Sequence[Beat], ranks: Sequence[int]) -> str:
    """Ranks by node, such as `rank 3 on n1, all of n2 (rank 8 to 15)`."""
    by_node: dict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        by_node[beats[rank].node].append(rank)
    texts = []
    for node, found in list(by_node.items())[:MOST_NODES]:
        more = f" and {len(found) - MOST_RANKS} more" if len(found) > MOST_RANKS else ""
        listed = ", ".join(map(str, found[:MOST_RANKS]))
        is_whole = len(found) == sum(beat.node == node for beat in beats) > 1
        if is_whole and found[-1] - found[0] == len(found) - 1:
            texts.append(f"all of {node} (rank {found[0]} to {found[-1]})")
        else:
            texts.append(f"rank {listed}{more} on {node}")
    rest = len(by_node) - MOST_NODES
    return ", ".join(texts) + (f" and ranks on {rest} more nodes" if rest > 0 else "")


def collectives_begun() -> int:
    """How many collectives this process has begun, over all groups; 0 where torch does not say."""
    with suppress(AttributeError, RuntimeError):
        groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
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
