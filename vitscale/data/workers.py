"""Fill batches in worker processes.

Owns: workers and their shared memory, which worker fills which batch, and errors when one dies or
hangs.
Leaves out: the order (`order`), single samples (`samples`), batches as training takes them
(`loader`).

Workers come from a server (`fork_server`) and start in milliseconds, so each stream of batches has
its own. Pixels go through a ring of slots in shared memory, all else through a pipe per worker.
There is no lock: a worker that is killed or stopped harms no other.
"""

from __future__ import annotations

import importlib
import math
import mmap
import os
import signal
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from typing import NamedTuple, Protocol

import torch

from vitscale.config.errors import RankError, UserError, WorkerError
from vitscale.distributed.fork_server import (
    SIGNALS,
    end_with_server,
    start_server,
    worker_context,
)
from vitscale.distributed.processes import process_state

# With these torch, the decoders and all readers of samples.
IMPORTS = ("vitscale.data.workers", "vitscale.data.samples")
# Batches that each worker prepares ahead.
PREFETCH = 2
# How long to wait for the exit codes of dead workers.
EXIT_WAIT_S = 5.0
# A worker hangs when this many waits in a row end without a batch. If the machine is suspended,
# only one of them expires, however long the pause.
NUM_WAITS = 16


class Unreadable(NamedTuple):
    """A sample that could not be read or decoded."""

    part: int
    """Which set of shards."""
    sample: int
    """Its number in that set; the trainer looks up the key, once."""
    shard: str
    error: str
    key: str | None = None
    """Its key where there is no index to look it up in."""


class Samples(Protocol):
    """Fills one image into a row of a batch; returns its label and unreadable samples."""

    image_size: int

    def start(self, *, worker: int, num_workers: int) -> None:
        """Called once in the process that reads, before it reads."""
        return

    def prefetch(self, positions: Sequence[int]) -> None:
        """Called with the positions of a batch, before they are filled."""
        return

    def fill(self, position: int, out: torch.Tensor) -> tuple[int, list[Unreadable]]:
        """Write an image into `out`, uint8 [3, rows, columns]."""
        ...


class Filled(NamedTuple):
    """A batch in its slot, valid until the next one is taken."""

    images: torch.Tensor
    """uint8 [B, 3, rows, columns]"""
    labels: list[int]
    unreadable: list[Unreadable]


def start_loader_server(num_workers: int) -> None:
    """Start the server of workers, if there will be any, before this process has a thread.

    It shares the imports of this process.
    """
    if num_workers:
        for name in IMPORTS:
            importlib.import_module(name)
        start_server(IMPORTS)


def fill_batch(
    samples: Samples, positions: Sequence[int], images: torch.Tensor
) -> tuple[list[int], list[Unreadable]]:
    """Write the images at some positions; their labels, and the samples that were unreadable.

    images: uint8 [at least as many, 3, rows, columns].
    Raises RankError for any UserError: the other ranks do not know about it.
    """
    labels, unreadable = [], []
    try:
        samples.prefetch(positions)
        for row, position in zip(images, positions, strict=False):
            label, skipped = samples.fill(position, row)
            labels.append(label)
            unreadable += skipped
    except RankError:
        raise
    except UserError as error:
        raise RankError(
            error.what, where=error.where, allowed=error.allowed, next_step=error.next_step
        ) from None
    return labels, unreadable


class _Task(NamedTuple):
    """What the workers of a stream fill batches with."""

    samples: Samples
    slots: tuple[int, ...]
    """Shape of the slots, whose descriptor is sent through the pipe."""
    cores: Sequence[int]
    """Those of the trainer, which may be bound."""
    num_workers: int


class _Reply(NamedTuple):
    """A batch is filled, or why not."""

    labels: list[int] = []
    unreadable: list[Unreadable] = []
    error: UserError | None = None
    """Raised by the trainer."""
    crash: str | None = None
    """Traceback of any other error."""


class Workers:
    """The batches of one source of samples, in order. Batch n comes from worker n modulo their
    number.

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
        """Start to fill batches. positions: of each batch, at most `batch` each."""
        self.timeout_s, self._positions = timeout_s, iter(positions)
        self._sizes: deque[int] = deque()
        self._num_assigned = 0
        self._workers: list[_Worker] = []
        size = samples.image_size
        # One more than the batches ahead: the one that is being read.
        shape = (num_workers * PREFETCH + 1, batch, 3, size, size)
        # No file: the size of /dev/shm is no limit.
        memory = os.memfd_create("batches", os.MFD_CLOEXEC)
        try:
            os.ftruncate(memory, math.prod(shape))
            self._slots = _mapped(memory, shape)
            task = _Task(samples, shape, sorted(os.sched_getaffinity(0)), num_workers)
            for number in range(num_workers):
                self._workers.append(_Worker(number, task, memory))
        except BaseException:
            self.close()
            raise
        finally:
            os.close(memory)  # its memory lives as long as a tensor shows it
        for _ in range(PREFETCH * num_workers):
            self._assign()

    def _assign(self) -> None:
        """Send the next batch, if there is one, to its worker."""
        positions = next(self._positions, None)
        if positions is None:
            return
        number = self._num_assigned
        try:
            self._worker(number).connection.send((number % len(self._slots), positions))
        except OSError:
            raise self._dead() from None
        self._num_assigned += 1
        self._sizes.append(len(positions))

    def _worker(self, number: int) -> _Worker:
        """The worker of a batch."""
        return self._workers[number % len(self._workers)]

    def __iter__(self) -> Iterator[Filled]:
        for number in count():
            if number == self._num_assigned:
                return
            reply = self._reply(self._worker(number))
            if reply.error is not None:
                raise reply.error
            if reply.crash is not None:
                raise RuntimeError(f"a loader worker failed:\n{reply.crash}")
            self._assign()
            images = self._slots[number % len(self._slots), : self._sizes.popleft()]
            yield Filled(images, reply.labels, reply.unreadable)

    def _reply(self, worker: _Worker) -> _Reply:
        """Raises WorkerError if none comes, or any worker dies."""
        sentinels = [each.process.sentinel for each in self._workers]
        for _ in range(NUM_WAITS):
            ready = wait([worker.connection, *sentinels], self.timeout_s / NUM_WAITS)
            if worker.connection in ready:
                try:
                    reply: _Reply = worker.connection.recv()
                    return reply
                except (EOFError, OSError):
                    raise self._dead() from None
            if ready:
                raise self._dead()
        raise self._hung(worker)

    def _dead(self) -> WorkerError:
        wait([worker.process.sentinel for worker in self._workers], EXIT_WAIT_S)
        dead = [worker for worker in self._workers if not worker.process.is_alive()]
        codes = ", ".join(f"{worker.name}): {worker.process.exitcode}" for worker in dead)
        return WorkerError(
            f"a loader worker died; exit codes: {codes or 'unknown'}",
            where="data.num_workers",
            next_step="exit code -9 usually means the OOM killer: lower data.num_workers or raise "
            "the job's memory",
        )

    def _hung(self, due: _Worker) -> WorkerError:
        states = {worker: process_state(worker.process.pid or 0) for worker in self._workers}
        slow = ", ".join(
            f"{worker.name}, {state})"
            for worker, state in states.items()
            if worker is due or state == "stopped"
        )
        return WorkerError(
            f"{slow} gave no batch for {self.timeout_s:g} s",
            next_step="check the storage of the shards; py-spy dump --pid PID shows what it does",
        )

    def close(self) -> None:
        """Kill the workers. Waits for none."""
        for worker in self._workers:
            worker.process.kill()
            worker.connection.close()


class _Worker:
    """One worker process."""

    def __init__(self, number: int, task: _Task, memory: int) -> None:
        context = worker_context(IMPORTS)
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=_run, args=(theirs, task, number), name=f"loader-{number}", daemon=True
        )
        try:
            self.process.start()
            reduction.send_handle(self.connection, memory, self.process.pid)
        except (EOFError, OSError) as error:
            raise WorkerError(
                f"a loader worker cannot be started ({error or 'its server has ended'})",
                where="data.num_workers",
                next_step="see the error printed above this one; free memory, or lower the number",
            ) from None
        finally:
            theirs.close()

    @property
    def name(self) -> str:
        return f"{self.process.name} (pid {self.process.pid}"


def _run(connection: Connection, task: _Task, number: int) -> None:
    """Serve until the trainer is gone."""
    end_with_server()
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    os.sched_setaffinity(0, task.cores)
    torch.set_num_threads(1)
    with suppress(EOFError, ConnectionError):
        _serve(connection, task, number)
    # Threads that read ahead may wait for the network.
    os._exit(0)


def _serve(connection: Connection, task: _Task, number: int) -> None:
    slots = _mapped(reduction.recv_handle(connection), task.slots)
    task.samples.start(worker=number, num_workers=task.num_workers)
    while True:
        slot, positions = connection.recv()
        connection.send(_filled(task.samples, positions, slots[slot]))


def _filled(samples: Samples, positions: Sequence[int], images: torch.Tensor) -> _Reply:
    try:
        return _Reply(*fill_batch(samples, positions, images))
    except UserError as error:
        return _Reply(error=error)
    except Exception:
        return _Reply(crash=traceback.format_exc())


def _mapped(memory: int, shape: tuple[int, ...]) -> torch.Tensor:
    """The slots of all processes, uint8 [slots, batch, 3, rows, columns].

    When batch n is read, workers have at most batch n + num_workers * PREFETCH, so none writes to
    the slot that is being read.
    """
    return torch.frombuffer(mmap.mmap(memory, math.prod(shape)), dtype=torch.uint8).view(shape)
