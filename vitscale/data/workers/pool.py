"""The loader workers of a process: started once, used by every stream of batches.

Owns: starting and ending workers, which worker fills which batch, and errors when one dies or
hangs.
Leaves out: what a worker does (`process`), batches as training takes them (`loader`).

Each worker has a pipe of its own and no lock: one that is killed or stopped harms no other.
"""

from __future__ import annotations

import atexit
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import count
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from typing import NamedTuple

import torch

from vitscale.config.errors import WorkerError
from vitscale.data.workers.process import Close, Fill, Open, Reply, run
from vitscale.data.workers.samples import Samples, Unreadable
from vitscale.data.workers.server import IMPORTS
from vitscale.data.workers.slots import PREFETCH, BatchSlots
from vitscale.distributed.fork_server import worker_context
from vitscale.distributed.node_share import share
from vitscale.distributed.processes import process_state

# How long to wait for the exit code of a worker whose connection broke, and for its end.
EXIT_WAIT_S = 5.0
# Limit of sending and receiving one message, which are small.
MESSAGE_S = 5.0
# A worker hangs when this many waits in a row end without a batch. If the machine is suspended,
# only one of them expires, however long the pause.
NUM_WAITS = 16


class Filled(NamedTuple):
    """A batch in its slot, valid until the next one is taken."""

    images: torch.Tensor
    labels: torch.Tensor
    unreadable: tuple[Unreadable, ...]


class _Worker:
    """One worker process and the replies that nobody has taken yet."""

    def __init__(self, number: int) -> None:
        context = worker_context(IMPORTS)
        self.connection, theirs = context.Pipe()
        _limit_waits(self.connection)
        self.process = context.Process(
            target=run,
            args=(theirs, sorted(os.sched_getaffinity(0))),
            name=f"loader-{number}",
            daemon=True,
        )
        try:
            self.process.start()
        except (EOFError, OSError) as error:
            raise WorkerError(
                f"a loader worker cannot be started ({error or 'its server has ended'})",
                where="data.num_workers",
                next_step="see the error printed above this one; free memory, or lower the number",
            ) from None
        finally:
            theirs.close()
        self.replies: dict[tuple[int, int], Reply] = {}
        self.lock = threading.Lock()

    @property
    def name(self) -> str:
        return f"{self.process.name} (pid {self.process.pid}"

    def send(self, message: Open | Fill | Close, descriptors: Sequence[int] = ()) -> None:
        self.connection.send(message)
        if descriptors:
            with socket.socket(fileno=os.dup(self.connection.fileno())) as channel:
                reduction.sendfds(channel, list(descriptors))

    def receive(self) -> Reply:
        reply: Reply = self.connection.recv()
        return reply


class WorkerPool:
    """All workers of this process."""

    def __init__(self) -> None:
        self.workers: list[_Worker] = []
        self.streams: set[int] = set()
        self.numbers = count()
        self.process = os.getpid()
        atexit.register(self.kill)

    def first(self, num_workers: int) -> list[_Worker]:
        """Some workers; those that are missing are started."""
        for number in range(len(self.workers), num_workers):
            self.workers.append(_Worker(number))
        return self.workers[:num_workers]

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self.workers if worker.process.pid is not None]

    def reply(self, worker: _Worker, *, stream: int, number: int, timeout_s: float) -> Reply:
        """The reply to a batch. Raises WorkerError if it does not come, or any worker dies."""
        num_waits = 0
        while (found := worker.replies.pop((stream, number), None)) is None:
            # Another thread may read for its own stream.
            if not worker.lock.acquire(timeout=0.01):
                continue
            try:
                if (stream, number) in worker.replies:
                    continue
                ready = wait(
                    [worker.connection, *(each.process.sentinel for each in self.workers)],
                    timeout_s / NUM_WAITS,
                )
                if worker.connection in ready:
                    reply = worker.receive()
                    if reply.stream in self.streams:
                        worker.replies[reply.stream, reply.number] = reply
                    num_waits = 0
                elif ready:
                    raise self._dead()
                else:
                    num_waits += 1
            except BlockingIOError:  # it stopped within a message
                num_waits = NUM_WAITS
            except (EOFError, OSError):
                raise self._dead() from None
            finally:
                worker.lock.release()
            if num_waits == NUM_WAITS:
                raise self._hung(worker, timeout_s=timeout_s)
        return found

    def _dead(self) -> WorkerError:
        wait([worker.process.sentinel for worker in self.workers], EXIT_WAIT_S)
        dead = [worker for worker in self.workers if not worker.process.is_alive()]
        codes = ", ".join(f"{worker.name}): {worker.process.exitcode}" for worker in dead)
        self.kill()
        return WorkerError(
            f"a loader worker died; exit codes: {codes or 'unknown'}",
            where="data.num_workers",
            next_step="exit code -9 usually means the OOM killer: lower data.num_workers or raise "
            "the job's memory",
        )

    def _hung(self, due: _Worker, *, timeout_s: float) -> WorkerError:
        states = {worker.name: process_state(worker.process.pid or 0) for worker in self.workers}
        slow = ", ".join(
            f"{name}, {state})"
            for name, state in states.items()
            if name == due.name or state == "stopped"
        )
        self.kill()
        return WorkerError(
            f"{slow} gave no batch for {timeout_s:g} s",
            next_step="check the storage of the shards; py-spy dump --pid PID shows what it does",
        )

    def kill(self) -> None:
        """Kill all workers; the next stream starts others. A worker that cannot end is left."""
        if os.getpid() != self.process:
            return
        atexit.unregister(self.kill)
        worker_pool.cache_clear()
        self.streams.clear()
        for worker in self.workers:
            worker.process.kill()
        ends = time.monotonic() + EXIT_WAIT_S
        for worker in self.workers:
            worker.process.join(max(0.0, ends - time.monotonic()))


@cache
def worker_pool() -> WorkerPool:
    """The workers of this process."""
    return WorkerPool()


class Stream:
    """Batches of one source of samples, in order. Batch n comes from worker n modulo their number.

    Iteration raises WorkerError, the RankError of a worker, RuntimeError for any other of its
    errors.
    """

    def __init__(
        self,
        samples: Samples,
        positions: Iterable[Sequence[int]],
        *,
        batch: int,
        num_workers: int,
        timeout_s: float,
    ) -> None:
        """positions: of each batch, at most `batch` each."""
        self.pool, self.timeout_s = worker_pool(), timeout_s
        self.workers = self.pool.first(num_workers)
        self.stream = next(self.pool.numbers)
        self.positions = iter(positions)
        self.sizes: list[int] = []
        self.num_assigned = 0
        size = samples.image_size
        self.slots = BatchSlots(num_workers=num_workers, batch=batch, image_size=size)
        self.pool.streams.add(self.stream)
        with share(samples) as shared:
            descriptors = [*shared.descriptors, self.slots.descriptor]
            for number, worker in enumerate(self.workers):
                message = Open(
                    self.stream, shared.pieces, len(descriptors), batch, size, number, num_workers
                )
                self._send(worker, message, descriptors)
        self.slots.close()
        for _ in range(PREFETCH * num_workers):
            self._assign()

    def _send(self, worker: _Worker, message: Open | Fill, descriptors: Sequence[int] = ()) -> None:
        try:
            worker.send(message, descriptors)
        except BlockingIOError:
            raise self.pool._hung(worker, timeout_s=MESSAGE_S) from None
        except OSError:
            raise self.pool._dead() from None

    def _assign(self) -> None:
        """Send the next batch, if there is one, to its worker."""
        positions = next(self.positions, None)
        if positions is None:
            return
        number, size = self.num_assigned, len(positions)
        self.slots.positions[self.slots.slot_of(number), :size] = torch.tensor(positions)
        self._send(self.workers[number % len(self.workers)], Fill(self.stream, number, size))
        self.num_assigned += 1
        self.sizes.append(size)

    def __iter__(self) -> Iterator[Filled]:
        for number in count():
            if number == self.num_assigned:
                return
            worker = self.workers[number % len(self.workers)]
            reply = self.pool.reply(
                worker, stream=self.stream, number=number, timeout_s=self.timeout_s
            )
            if reply.error is not None:
                raise reply.error
            if reply.crash is not None:
                raise RuntimeError(f"a loader worker failed:\n{reply.crash}")
            self._assign()
            slot, size = self.slots.slot_of(number), self.sizes.pop(0)
            images, labels = self.slots.images[slot, :size], self.slots.labels[slot, :size]
            yield Filled(images, labels, tuple(reply.unreadable))

    def close(self) -> None:
        """Let the workers forget the stream. Waits for nothing."""
        if self.stream not in self.pool.streams:
            return  # the pool was killed
        self.pool.streams.remove(self.stream)
        for worker in self.workers:
            for key in list(worker.replies):
                if key[0] == self.stream:
                    worker.replies.pop(key, None)
            _, writable, _ = select.select([], [worker.connection], [], 0)
            try:
                if writable:
                    worker.send(Close(self.stream))
            except OSError:
                self.pool.kill()
                return


def _limit_waits(connection: Connection) -> None:
    """Let a read or write of the trainer fail when the other side stops within a message."""
    limit = struct.pack("ll", int(MESSAGE_S), 0)
    with socket.socket(fileno=os.dup(connection.fileno())) as channel:
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
