"""Detect and name ranks that failed, died or hang, and end all others.

Once a period, a thread of each rank writes a heartbeat to the key-value store of rank 0 and reads
one key there: the failure that ends the run. A rank that raises an error writes that key. The first
two ranks read all heartbeats, and write it for a rank that is silent or behind. The first failure
counts, and all end. Time is counted in periods of the rank that waits, so a job that was suspended
finds nobody silent.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from vitscale.config.errors import (
    FailureKind,
    FolderTakenError,
    NodeError,
    RankError,
    UserError,
    on_node,
    print_note,
)
from vitscale.distributed.events import READ_FAILURE, Failure, record_failure
from vitscale.distributed.processes import end_now, end_soon, node_name
from vitscale.distributed.world import HERE, SAVES, World, process_group

# A period is a tenth of the time after which a rank is late, and at most this long.
LONGEST_PERIOD_S = 3.0
# A node without power is named within a minute, whatever the timeout of collectives.
LONGEST_SILENCE_S = 45.0
# Shorter than the timeout of collectives, which names no rank.
SHARE_OF_TIMEOUT = 0.7
# Silence in periods that is enough once a connection is lost.
CONFIRM = 2
# How long a rank that lost a peer waits for the name of the one that failed.
FIND = 5
# Time for the others to read the failure before the store of rank 0 ends.
READ = 1.5
# How long a report may take to be sent, and to be recorded.
SEND_S = 1.0
# How long a rank with an error waits for the others to have one, too, and how often it asks.
AGREE_S = 5.0
POLL_S = 0.05
# Two, since one may be the rank that is gone.
FIRST_RANKS = 2
FAILURE = "vitscale/failure"
REFUSED = "vitscale/refused"
# How gloo, NCCL and the store say that a peer is gone.
CONNECTION_LOST = re.compile(
    r"[Cc]onnection|[Tt]imed out|[Tt]imeout|Broken pipe|got 0 bytes|remote process exited"
)
DEVICE_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError)


class Beat(NamedTuple):
    """One heartbeat of one rank."""

    number: int
    progress: list[int]
    """Marks that the rank has reached, and its device, too; collectives that it has begun: fewer if
    the others wait for it between two marks."""
    doing: str
    """Since the mark that it has reached."""
    has_lost: bool
    """Whether a collective failed because a peer is gone."""
    ended: bool
    """Whether it came to its planned end."""


class Watchdog:
    """Exchange heartbeats of all ranks inside the block."""

    def __init__(
        self, world: World, *, timeout_min: float, folder: Path | None = None
    ) -> None:
        """folder: of the run, where failures are recorded."""
        self.world = world
        self.folder = folder
        self._store: Any = world.store
        self.step: int | None = None
        """Steps that this rank has done."""
        self.late_s = timeout_min * 60 * SHARE_OF_TIMEOUT
        self.dead_s = min(self.late_s, LONGEST_SILENCE_S)
        self.period_s = min(LONGEST_PERIOD_S, self.late_s / 10)

        self._nodes = {world.rank: node_name()}
        # Marks that the device has not reached yet.
        self._ahead: deque[tuple[int, str, torch.cuda.Event | None]] = deque()
        self._num_marks = 0
        self._reached = (0, "starting")
        self._num_beats = self._unanswered = 0
        self._has_lost = self._is_failing = self._is_store_lost = False
        # The first ranks know the last heartbeat of each rank and, in periods, how long it has been
        # the last one, and how long no rank made progress.
        self._beats: list[Beat] = []
        self._silent = [0] * world.world_size
        self._stalled = 0

        self._end = threading.Event()
        # Two: the one that uses the store blocks while rank 0 is stopped.
        self._threads = [
            threading.Thread(target=target, name="watchdog", daemon=True)
            for target in (self._run, self._watch_store)
        ]

    def mark(self, doing: str) -> None:
        """Record progress of the loop; every rank makes the same marks in the same order."""
        if self._store is None:
            # A rank alone has nobody to tell.
            return
        on_device = self.world.device.type == "cuda"
        # An event shows whether the device has reached the mark, without waiting for it.
        event = torch.cuda.current_stream().record_event() if on_device else None
        self._num_marks += 1
        self._ahead.append((self._num_marks, doing, event))

    def __enter__(self) -> Watchdog:
        if self._store is not None:
            self._node(0)  # it cannot be asked for once rank 0 is gone
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._store is None:
            return
        # The failure must be read by the others before the store ends with this process.
        if self._is_failing and self.world.is_first:
            self._end.wait(READ * self.period_s)
        self._end.set()
        # The wait has a limit, since the store does not answer while rank 0 is stopped.
        self._threads[0].join(timeout=SEND_S)

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Report an error that leaves the block to the other ranks, before anything is closed.

        The process then ends within `processes.EXIT_S`. To be the innermost block of a run.
        A UserError that not all ranks have becomes a NodeError.
        """
        try:
            yield
        except Exception as error:
            judged = self._judged(error)
            self._fail(judged)
            if judged is error:
                raise
            raise judged from error

    def _judged(self, error: Exception) -> Exception:
        """The error, or the fault of a node: bad input is what all ranks find at the same point.

        They are counted in the store, since the others may be in a collective.
        """
        # Failures of storage, devices or peers are faults of one node already.
        if not isinstance(error, UserError) or error.kind is not FailureKind.BAD_INPUT:
            return error
        if self._store is None or self._raised_by_all():
            return error
        return on_node(error, rank=self.world.rank, node=node_name())

    def _raised_by_all(self) -> bool:
        """Whether all ranks come here within AGREE_S."""
        with suppress(RuntimeError):  # rank 0 is gone
            self._store.add(REFUSED, 1)
            deadline = time.monotonic() + AGREE_S
            while time.monotonic() < deadline:
                if self._store.add(REFUSED, 0) == self.world.world_size:
                    return True
                self._end.wait(POLL_S)
        return False

    def _fail(self, error: BaseException) -> None:
        """Report that this rank ends by an error. Nothing may wait for other ranks after it."""
        kind, _ = kind_and_text(error)
        # The folder belongs to another run, which must not find this failure in its record.
        if isinstance(error, FolderTakenError):
            self.folder = None
        if self._store is not None and kind is FailureKind.PEER_LOST:
            self._has_lost = True
            # The thread ends this process when it knows who failed.
            self._end.wait(FIND * self.period_s)
            error.add_note("no rank is missing")

        end_soon(kind.exit_code)
        self._is_failing = True
        is_of_all = isinstance(error, UserError) and not isinstance(error, RankError)
        # The first rank reports what all ranks have in common.
        if self.world.is_first or not is_of_all:
            ended = "ended with an error"
            rank = self.world.rank
            self._tell(failure_of(error, rank=rank, ended=ended, step=self.step))

    def _failure(self, kind: FailureKind, what: str, ranks: Sequence[int]) -> Failure:
        """what: happened to these ranks, of which the first is named."""
        rank = ranks[0]
        node = self._node(rank)
        more = ""
        if len(ranks) > 1:
            more = f" (and {len(ranks) - 1} more)"
        return Failure(
            kind=kind,
            what=f"rank {rank} on {node}{more} {what}",
            rank=rank,
            node=node,
            step=self.step,
            reported_by=self.world.rank,
        )

    def _silence(self, ranks: Sequence[int], seconds: float) -> Failure:
        return self._failure(
            FailureKind.KILLED,
            f"has sent no heartbeat for {seconds:.0f} s: "
            "killed, stopped or ended, or its node is gone",
            ranks,
        )

    def _tell(self, failure: Failure) -> Failure:
        """Tell all ranks of a failure and record it, unless they know another; returns that one."""
        text = told = READ_FAILURE.dump_json(failure).decode()

        # The first report wins: later ranks fail because of it.
        if self._store is not None:
            with suppress(RuntimeError):  # rank 0 is gone
                told = self._store.compare_set(FAILURE, "", text).decode()
        if told == text:
            self._record(failure)
        return READ_FAILURE.validate_json(told)

    def _record(self, failure: Failure) -> None:
        """Record a failure, unless storage hangs."""
        if self.folder is not None:
            _returns(record_failure, self.folder, failure)

    # --- the threads -----------------------------------------------------------------------------

    def _run(self) -> None:
        """Send heartbeats, read what others have found, and find what they have not."""
        if self.world.device.type == "cuda":
            torch.cuda.set_device(self.world.device)  # or the thread would use GPU 0
        is_over = False
        while not is_over:
            is_over = self._end.is_set()
            failure = None
            try:
                self._send(ended=is_over and not self._is_failing)
                if not (is_over or self._is_failing):
                    failure = self._read() or self._find()
                self._unanswered = 0
            except RuntimeError:
                # The other thread decides when this is the end.
                self._is_store_lost = True
            if failure is not None:
                self._stop(failure)
            self._end.wait(self.period_s)

    def _watch_store(self) -> None:
        """End this rank if the store of rank 0 is gone or does not answer."""
        while not self._end.wait(self.period_s):
            self._unanswered += 1
            # A lost connection is evidence by itself, so it needs less silence.
            limit_s = CONFIRM * self.period_s if self._is_store_lost else self.dead_s
            if (self._unanswered - 1) * self.period_s >= limit_s:
                failure = self._silence([0], limit_s)
                # One record of each node is enough.
                records = self.world.rank < FIRST_RANKS or self.world.local_rank == 0
                if records and not self._is_failing:
                    self._record(failure)
                self._stop(failure)

    def _node(self, rank: int) -> str:
        if rank not in self._nodes:
            self._nodes[rank] = self._store.get(f"{HERE}/{rank}").decode()
        return self._nodes[rank]

    def _send(self, *, ended: bool) -> None:
        with suppress(RuntimeError):  # the device has failed, and with it the loop
            while self._ahead and (
                self._ahead[0][2] is None or self._ahead[0][2].query()
            ):
                self._reached = self._ahead.popleft()[:2]
        self._num_beats += 1
        marks, doing = self._reached
        progress = [marks, collectives_begun()]
        beat = Beat(
            self._num_beats, progress, doing, has_lost=self._has_lost, ended=ended
        )
        self._store.set(f"vitscale/beats/{self.world.rank}", json.dumps(beat))

    def _read(self) -> Failure | None:
        """The failure that ends the run, as another rank has found it."""
        if not self._store.check([FAILURE]):
            return None
        return READ_FAILURE.validate_json(self._store.get(FAILURE))

    def _find(self) -> Failure | None:
        """Find ranks that are silent or behind, and tell the others."""
        keys = [f"vitscale/beats/{rank}" for rank in range(self.world.world_size)]
        if self.world.rank >= FIRST_RANKS or not self._store.check(keys):
            return None

        before = self._beats  # none the first time
        self._beats = beats = [
            Beat(*json.loads(text)) for text in self._store.multi_get(keys)
        ]

        for rank, (old, new) in enumerate(zip(before, beats, strict=False)):
            is_silent = old.number == new.number and not new.ended
            self._silent[rank] = self._silent[rank] + 1 if is_silent else 0
        is_stalled = [old.progress for old in before] == [new.progress for new in beats]
        self._stalled = self._stalled + 1 if is_stalled else 0
        # After a lost connection somebody is gone, so that a shorter silence names it.
        limit_s = self.dead_s
        if any(beat.has_lost for beat in beats):
            limit_s = CONFIRM * self.period_s

        silent = [
            rank
            for rank, num in enumerate(self._silent)
            if num * self.period_s >= limit_s
        ]
        failure = self._silence(silent, limit_s) if silent else self._lateness()
        return failure and self._tell(failure)

    def _lateness(self) -> Failure | None:
        """The ranks that the others wait for; None when all have reached the same."""
        if self._stalled * self.period_s < self.late_s:
            return None

        # A rank that has ended as planned waits for nobody.
        present = {
            rank: beat for rank, beat in enumerate(self._beats) if not beat.ended
        }
        least = min(beat.progress for beat in present.values())
        late = [rank for rank, beat in present.items() if beat.progress == least]
        if len(late) == self.world.world_size:
            return None  # all in the same collective, or none in any; collectives have timeouts

        doing = ", ".join(sorted({present[rank].doing for rank in late}))
        kind = FailureKind.HANG
        what = f"has kept the others waiting for {self.late_s:.0f} s ({doing})"
        # Storage that hangs is the cause, whichever rank comes to wait for it first.
        if self.folder is not None and not _returns(os.path.exists, self.folder):
            kind = FailureKind.STORAGE
            what += f"; the storage of {self.folder} does not answer"
        return self._failure(kind, what, late)

    def _stop(self, failure: Failure) -> None:
        """End the process, whose loop may hang in a collective and cannot raise."""
        if self.world.is_first:
            self._end.wait(READ * self.period_s)
        if self._end.is_set() or self._is_failing:
            return
        # The log may hang, and a rank that waits for it must not be taken for a silent one.
        self._is_failing = True
        with suppress(OSError):
            text = (
                f"error: rank {self.world.rank}: {failure.text}\n"
                "  next: check that rank's node and output; run the same command again to resume "
                "from the newest checkpoint (engine.timeout_min is how long ranks wait)"
            )
            print_note(text)
        if failure.kind in (FailureKind.HANG, FailureKind.PEER_LOST):
            # Where each thread hangs is what a person needs to find the cause.
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        end_now(failure.kind.exit_code)


def _returns(call: Callable[..., Any], *arguments: Any) -> bool:
    """Make a call that storage may hang; whether it returns within SEND_S."""
    # A daemon, so that a hanging call does not keep the process.
    thread = threading.Thread(target=call, args=arguments, daemon=True)
    thread.start()
    thread.join(SEND_S)
    return not thread.is_alive()


def collectives_begun() -> int:
    """How many collectives this process has begun, over all groups but that of saves.

    0 where torch does not say.
    """
    with suppress(AttributeError, RuntimeError):
        # Private, but the only count that tells which rank is one collective behind.
        groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
        return sum(
            group._get_sequence_number_for_group()
            for group in groups
            if group.group_desc != SAVES
        )
    return 0


def kind_and_text(error: BaseException) -> tuple[FailureKind, str]:
    """The kind of an error, and its first line."""
    if isinstance(error, UserError):
        where = ""
        if error.where:
            where = f"{error.where}: "
        return error.kind, where + error.what.splitlines()[0]

    kind = FailureKind.OTHER
    line = str(error).partition("\n")[0]
    if isinstance(error, DEVICE_ERRORS):
        kind = FailureKind.DEVICE
    elif isinstance(error, RuntimeError) and CONNECTION_LOST.search(str(error)):
        kind = FailureKind.PEER_LOST
    elif isinstance(error, OSError):
        kind = FailureKind.STORAGE
    return kind, f"{type(error).__name__}: {line}".rstrip(": ")


def failure_of(
    error: BaseException, *, rank: int, ended: str, step: int | None = None
) -> Failure:
    """The report of an error that ends a rank, or of what another rank lacks.

    ended: how and when this rank did, for a sentence.
    """
    kind, what = kind_and_text(error)
    culprit: int | None = rank
    node: str | None = node_name()
    # The report names the node that lacks something, whichever rank writes it.
    if isinstance(error, NodeError):
        culprit = error.rank
        node = error.node
    else:
        what = f"rank {rank} on {node} {ended}: {what}"
    return Failure(
        kind=kind, what=what, rank=culprit, node=node, step=step, reported_by=rank
    )


def record_start_failure(folder: Path, error: UserError) -> None:
    """Record an error that ends this rank before there is a watchdog."""
    rank = int(os.environ["RANK"])
    # Rank 0 reports what all ranks have in common, the others only what is theirs alone.
    is_own = isinstance(error, RankError) and getattr(error, "rank", rank) == rank
    if rank == 0 or is_own:
        ended = "ended at its start"
        record_failure(folder, failure_of(error, rank=rank, ended=ended))


@contextmanager
def watched_ranks(folder: Path | None, limits: Any) -> Iterator[Watchdog]:
    """`process_group` with a watchdog; what runs inside belongs in its `reporting`.

    folder: where failures are recorded. limits: settings with device, timeout_min and num_threads.
    """
    with ExitStack() as stack:
        try:
            joined = process_group(
                device=limits.device,
                timeout_min=limits.timeout_min,
                num_threads=limits.num_threads,
            )
            world = stack.enter_context(joined)
        except UserError as error:
            if folder is not None:
                record_start_failure(folder, error)
            raise
        yield stack.enter_context(
            Watchdog(world, timeout_min=limits.timeout_min, folder=folder)
        )
