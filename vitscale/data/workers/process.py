"""A loader worker: fills batches of any number of streams, in the order in which it is told.

Owns: the messages between trainer and worker, and the loop of a worker.
Leaves out: which worker fills which batch (`pool`), single samples (`vitscale.data.samples`).
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import reduction
from multiprocessing.connection import Connection
from socket import AF_UNIX, SOCK_STREAM, socket
from typing import NamedTuple

import torch

from vitscale.config.errors import RankError, UserError
from vitscale.data.workers.samples import Samples, Unreadable
from vitscale.data.workers.slots import BatchSlots
from vitscale.distributed.fork_server import SIGNALS, end_with_server
from vitscale.distributed.node_share import FilePart, receive


class Open(NamedTuple):
    """Begin a stream. The descriptors of the samples and of the slots follow."""

    stream: int
    pieces: tuple[FilePart, ...]
    num_descriptors: int
    batch: int
    image_size: int
    worker: int
    num_workers: int


class Fill(NamedTuple):
    """Fill a batch, whose positions are in its slot."""

    stream: int
    number: int
    size: int


class Close(NamedTuple):
    stream: int


class Reply(NamedTuple):
    """A batch is filled, or why not."""

    stream: int
    number: int
    unreadable: Sequence[Unreadable] = ()
    error: UserError | None = None
    """Raised by the trainer."""
    crash: str | None = None
    """Traceback of any other error."""


class _Stream:
    """A stream in the process that reads it."""

    def __init__(self, message: Open, descriptors: Sequence[int]) -> None:
        self.slots = BatchSlots(
            num_workers=message.num_workers,
            batch=message.batch,
            image_size=message.image_size,
            descriptor=descriptors[-1],
        )
        self.slots.close()
        self.samples: Samples = receive(message.pieces, descriptors[:-1])
        self.samples.start(worker=message.worker, num_workers=message.num_workers)

    def fill(self, task: Fill) -> list[Unreadable]:
        slot = self.slots.slot_of(task.number)
        positions = self.slots.positions[slot, : task.size].tolist()
        labels, unreadable = fill_batch(self.samples, positions, self.slots.images[slot])
        self.slots.labels[slot, : task.size] = torch.tensor(labels)
        return unreadable


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


def run(connection: Connection, cores: Sequence[int]) -> None:
    """Serve until the trainer is gone. cores: those of the trainer, which may be bound."""
    end_with_server()
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(1)
    with suppress(EOFError, ConnectionError):
        _serve(connection)
    # Threads that read ahead may wait for the network.
    os._exit(0)


def _serve(connection: Connection) -> None:
    streams: dict[int, _Stream | str] = {}
    with socket(AF_UNIX, SOCK_STREAM, fileno=os.dup(connection.fileno())) as channel:
        while True:
            message = connection.recv()
            if isinstance(message, Open):
                descriptors = reduction.recvfds(channel, message.num_descriptors)
                try:
                    streams[message.stream] = _Stream(message, descriptors)
                except Exception:  # the trainer learns it with the first batch
                    streams[message.stream] = traceback.format_exc()
            elif isinstance(message, Fill):
                connection.send(_filled(streams[message.stream], message))
            else:
                del streams[message.stream]


def _filled(stream: _Stream | str, task: Fill) -> Reply:
    reply = Reply(task.stream, task.number)
    if isinstance(stream, str):
        return reply._replace(crash=stream)
    try:
        reply = reply._replace(unreadable=stream.fill(task))
    except UserError as error:
        reply = reply._replace(error=error)
    except Exception:
        reply = reply._replace(crash=traceback.format_exc())
    return reply
