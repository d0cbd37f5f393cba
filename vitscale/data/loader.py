"""Load batches in worker processes, from any position of training.

Workers come from a server (`fork_server`) and start in milliseconds, so each stream of batches has
its own. Pixels go through a ring of slots in shared memory, all else through a pipe per worker.
There is no lock: a worker that is killed or stopped harms no other.
"""

from __future__ import annotations

import math
import mmap
import os
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from multiprocessing import reduction
from multiprocessing.connection import Connection, Pipe
from multiprocessing.process import BaseProcess
from typing import NamedTuple

import numpy as np
import torch

from vitscale.config.errors import (
    RankError,
    RankStorageError,
    StorageError,
    UserError,
    WorkerError,
)
from vitscale.data import remote
from vitscale.data.order import rank_batches
from vitscale.data.samples import (
    Augmentation,
    Samples,
    StreamedSamples,
    TrainingSamples,
    Unreadable,
    split_views,
)
from vitscale.data.settings import DataSettings
from vitscale.data.target_rows import Features, decoded
from vitscale.data.targets import Header
from vitscale.data.training_set import TrainingSet
from vitscale.distributed.fork_server import (
    SIGNALS,
    end_with_server,
    start_server,
    start_worker,
)
from vitscale.distributed.processes import process_state

# With this torch, the decoders and the readers of training samples.
IMPORTS = ("vitscale.data.loader",)
# Batches that each worker prepares ahead.
PREFETCH = 2
# A run ends with an error if for this long the next batch does not come, and no worker finishes an
# image or fetches a part of a remote shard. Time on cores is no progress: endless loops spend it.
# It is waited for in parts: if the machine is suspended, only one expires, however long the pause.
TIMEOUT_S = 300.0
NUM_WAITS = 16
COUNTER_BYTES = 8
# How long to wait for the exit code of a dead worker.
EXIT_WAIT_S = 5.0
# Labels, and the samples that were unreadable; with the images, in a slot until the next is taken.
Labels = tuple[list[int], list[Unreadable]]
Filled = tuple[torch.Tensor, list[int], list[Unreadable]]
# Number of workers, and shape of the slots.
Layout = tuple[int, tuple[int, ...]]


@dataclass(frozen=True)
class Batch:
    """B images of one rank."""

    images: torch.Tensor
    """uint8 [B, 3, rows, columns]; of several views the first crop of the first."""
    labels: torch.Tensor
    """int64 [B]"""
    weights: torch.Tensor
    """float32 [B]: 1 for a sample, 0 for the padding of an evaluation's last batch."""
    unreadable: tuple[Unreadable, ...] = ()
    """Samples that were substituted."""
    mixed_labels: torch.Tensor | None = None
    """int64 [B], with mixing: labels of the partner images."""
    mix_lambda: torch.Tensor | None = None
    """float32 [B], with mixing: the share that each image keeps of itself."""
    positions: np.ndarray | None = None
    """int64 [B]: positions of the images in training, so that random draws do not depend on the
    number of ranks; in an evaluation their numbers in the split."""
    views: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """uint8 [B, count, 3, side, side] of each of `data.views`, in their order."""
    targets: Sequence[Features] = ()
    """Class token and patches of each teacher, where they are stored."""

    def with_views(self, shapes: Mapping[str, tuple[int, ...]]) -> Batch:
        """The same batch, whose `images` are [B, N], the pixels of all views, with its views."""
        views = split_views(self.images, shapes)
        first = next(iter(views.values()))
        return replace(self, images=first[:, 0], views=views)

    def with_targets(self, header: Header) -> Batch:
        """The same batch, whose `images` are [B, N], pixels and stored rows, with its targets."""
        num_pixels = self.images.shape[1] - header.content_bytes
        side = math.isqrt(num_pixels // 3)
        return replace(
            self,
            images=self.images[:, :num_pixels].unflatten(1, (3, side, side)),
            targets=decoded(self.images[:, num_pixels:], header),
        )

    def to(self, device: torch.device) -> Batch:
        tensors = self.images, self.labels, self.weights
        images, labels, weights = (
            each.to(device, non_blocking=True) for each in tensors
        )
        return Batch(images, labels, weights, self.unreadable)

    def keep_for(self, stream: torch.cuda.Stream) -> None:
        """Once freed, a GPU's memory is used again only after what this stream does until then."""
        for tensor in (self.images, self.labels, self.weights):
            tensor.record_stream(stream)


def start_loader_server(num_workers: int) -> None:
    """Start the server of workers, if there will be any, before this process has a thread."""
    if num_workers:
        start_server(IMPORTS)


def training_batches(
    training_set: TrainingSet,
    *,
    settings: DataSettings,
    image_size: int,
    seed: int,
    start: int,
    stop: int,
    rank: int,
    world_size: int,
    micro_batch: int,
    pin_memory: bool,
) -> AbstractContextManager[Iterator[Batch]]:
    """Micro-batches of one rank between two positions of training; see `open_batches`."""
    positions = rank_batches(
        start=start,
        stop=stop,
        rank=rank,
        world_size=world_size,
        micro_batch=micro_batch,
    )
    augmentation = Augmentation(settings, image_size=image_size, seed=seed)

    samples: Samples
    if settings.is_streamed:
        place = (rank, world_size)
        samples = StreamedSamples(training_set, augmentation, start=start, place=place)
    else:
        samples = TrainingSamples(training_set, augmentation)

    return open_batches(
        samples, positions, batch=micro_batch, settings=settings, pin_memory=pin_memory
    )


@contextmanager
def open_batches(
    samples: Samples,
    positions: Iterable[Sequence[int]],
    *,
    batch: int,
    settings: DataSettings,
    pin_memory: bool,
) -> Iterator[Iterator[Batch]]:
    """Iterate over batches of these positions, at most `batch` each. Workers start to fill at once.

    Raises WorkerError, naming the worker, if one dies or hangs, and RankError for what a worker
    cannot read. The end of the block waits for no worker.
    """
    if settings.num_workers:
        with _filled_by_workers(
            samples, positions, batch, settings.num_workers
        ) as received:
            yield (_copied(each, pinned=pin_memory) for each in received)
    else:
        samples.start(worker=0, num_workers=1)
        images = torch.empty(batch, *samples.shape, dtype=torch.uint8)
        filled = ((images[: len(p)], *_fill(samples, p, images)) for p in positions)
        yield (_copied(each, pinned=pin_memory) for each in filled)


def _copied(filled: Filled, *, pinned: bool) -> Batch:
    """Copy a batch out of its slot. From pinned memory copies to the GPU are asynchronous; torch
    rounds it up to a power of two, thrice on a rank: 39 to 67 MB for 256 images of 224 px."""
    slot, numbers, unreadable = filled
    labels = torch.tensor(numbers, pin_memory=pinned)
    weights = torch.ones(len(numbers), pin_memory=pinned)
    if pinned:
        images = slot.pin_memory()
    else:
        # By numpy: torch's threads would wait for cores that decode; its memory has small pages.
        images = torch.from_numpy(slot.numpy().copy())
    return Batch(images, labels, weights, tuple(unreadable))


def _fill(
    samples: Samples,
    positions: Sequence[int],
    images: torch.Tensor,
    advance: Callable[[], None] = lambda: None,
) -> Labels:
    """Write the images at some positions. Raises RankError for any UserError, and RankStorageError
    for StorageError: the other ranks do not know about it. advance: to call after each image."""
    labels = []
    unreadable = []

    try:
        samples.prefetch(positions)
        for row, position in zip(images, positions, strict=False):
            label, skipped = samples.fill(position, row)
            labels.append(label)
            unreadable += skipped
            advance()
    except UserError as error:
        # The kind decides whether the job is tried again: storage may recover, a wrong setting not.
        kind = RankStorageError if isinstance(error, StorageError) else RankError
        raise kind(
            error.what,
            where=error.where,
            allowed=error.allowed,
            next_step=error.next_step,
        ) from None
    return labels, unreadable


# ---- workers -------------------------------------------------------------------------------------


class _Worker(NamedTuple):
    process: BaseProcess
    connection: Connection


def _mapped(
    memory: int, num_workers: int, shape: tuple[int, ...]
) -> tuple[torch.Tensor, np.ndarray]:
    """Map the memory that a rank shares with its workers.

    shape: of the slots, [slots, batch, ...].
    Returns the slots, uint8, and how many steps of its work each worker has done, int64 [workers].
    When batch n is read, workers have at most batch n + num_workers * PREFETCH, so none writes to
    the slot that is being read.
    """
    # The counters come first, where they are aligned.
    offset = num_workers * COUNTER_BYTES
    num_bytes = offset + math.prod(shape)
    os.ftruncate(memory, num_bytes)
    mapping = mmap.mmap(memory, num_bytes)
    pixels = torch.frombuffer(mapping, dtype=torch.uint8, offset=offset)
    progress = np.frombuffer(mapping, np.int64, count=num_workers)
    return pixels.view(shape), progress


@contextmanager
def _filled_by_workers(
    samples: Samples, positions: Iterable[Sequence[int]], batch: int, num_workers: int
) -> Iterator[Iterator[Filled]]:
    """The batches in order; batch n comes from worker n modulo their number."""
    # One more than the batches ahead: the one that is being read.
    num_slots = num_workers * PREFETCH + 1
    layout = (num_workers, (num_slots, batch, *samples.shape))
    # No file: the size of /dev/shm is no limit.
    memory = os.memfd_create("batches", os.MFD_CLOEXEC)
    workers: list[_Worker] = []
    assigned: deque[int] = deque()
    to_do = enumerate(positions)

    def assign() -> None:
        """Send the next batch, if there is one, to its worker."""
        for number, each in islice(to_do, 1):
            with suppress(OSError):  # it is dead, as the wait for its reply will find
                workers[number % num_workers].connection.send(
                    (number % num_slots, each)
                )
            assigned.append(number)

    def filled() -> Iterator[Filled]:
        while assigned:
            number = assigned.popleft()
            labels, unreadable = _reply(workers[number % num_workers], progress)
            assign()
            yield slots[number % num_slots, : len(labels)], labels, unreadable

    try:
        slots, progress = _mapped(memory, *layout)
        for number in range(num_workers):
            workers.append(_started(memory, samples, layout, number))
        # All workers exist by now: batch n goes to worker n modulo their number.
        for _ in range(PREFETCH * num_workers):
            assign()
        yield filled()
    finally:
        # The mapping and the workers' own descriptors keep the memory alive.
        os.close(memory)
        for worker in workers:  # waits for none
            worker.process.kill()
            worker.connection.close()


def _started(memory: int, samples: Samples, layout: Layout, number: int) -> _Worker:
    ours, theirs = Pipe()
    arguments = (theirs, samples, layout, number)
    try:
        process = start_worker(_run, arguments, imports=IMPORTS)
        reduction.send_handle(ours, memory, process.pid)
    except (EOFError, OSError) as error:
        raise WorkerError(
            f"a loader worker cannot be started ({error or 'its server has ended'})",
            where="data.num_workers",
            next_step="see the error printed above this one; free memory, or lower the number",
        ) from None
    finally:
        theirs.close()
    return _Worker(process, ours)


def _reply(worker: _Worker, progress: np.ndarray) -> Labels:
    """Raises WorkerError if the worker dies, or gives no batch while none makes progress, and its
    errors."""
    process = worker.process

    # Progress of any worker restarts the wait: they share cores and storage, so the one whose
    # batch is due may merely be slow.
    num_waits = 0
    before = int(progress.sum())
    while num_waits < NUM_WAITS:
        if worker.connection.poll(TIMEOUT_S / NUM_WAITS):
            try:
                reply = worker.connection.recv()
            except (EOFError, OSError):
                process.join(EXIT_WAIT_S)
                raise WorkerError(
                    f"a loader worker died: pid {process.pid}, exit code {process.exitcode}",
                    where="data.num_workers",
                    next_step="exit code -9 usually means the OOM killer: lower data.num_workers "
                    "or raise the job's memory",
                ) from None
            if isinstance(reply, Exception):
                raise reply
            return reply

        now = int(progress.sum())
        num_waits = num_waits + 1 if now == before else 0
        before = now
    raise WorkerError(
        f"a loader worker (pid {process.pid}, {process_state(process.pid or 0)}) gave no batch and "
        f"no worker finished an image for {TIMEOUT_S:g} s",
        next_step="check the storage of the shards; py-spy dump --pid PID shows what it does",
    )


def _run(connection: Connection, samples: Samples, layout: Layout, number: int) -> None:
    """Fill slots, whose descriptor comes through the pipe, until the trainer is gone."""
    # Without the trainer there is nothing to do, so a worker must not outlive its server.
    end_with_server()
    # Signals reach the whole process group. The trainer handles them, and ends its workers.
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    # Workers already use all cores; more threads would compete with them.
    torch.set_num_threads(1)
    with suppress(EOFError, ConnectionError):
        memory = reduction.recv_handle(connection)
        num_workers, shape = layout
        slots, progress = _mapped(memory, num_workers, shape)

        def advance() -> None:
            progress[number] += 1

        remote.on_part_fetched = advance
        samples.start(worker=number, num_workers=num_workers)

        while True:
            slot, positions = connection.recv()
            reply: Labels | Exception
            try:
                reply = _fill(samples, positions, slots[slot], advance)
            except RankError as error:
                reply = error
            except Exception:
                # The traceback would be lost with this process, so it travels as text.
                reply = RuntimeError(
                    f"a loader worker failed:\n{traceback.format_exc()}"
                )
            connection.send(reply)
    # Threads that read ahead may wait for the network.
    os._exit(0)
