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
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing import reduction
from multiprocessing.connection import Connection, Pipe
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

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
from vitscale.data.index import SplitIndex
from vitscale.data.order import rank_batches
from vitscale.data.samples import (
    Augmentation,
    EvaluationSamples,
    Samples,
    StreamedSamples,
    TrainingSamples,
    Unreadable,
)
from vitscale.data.settings import DataSettings, MixingSettings
from vitscale.data.training_set import TrainingSet
from vitscale.distributed.fork_server import (
    SIGNALS,
    end_with_server,
    start_server,
    start_worker,
)
from vitscale.distributed.processes import process_state
from vitscale.distributed.random_numbers import CounterRandom, stream_key

# With this torch, the decoders and all readers of samples.
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


@dataclass(frozen=True, slots=True)
class Batch:
    """B images of one rank."""

    images: torch.Tensor
    """uint8 [B, 3, rows, columns]"""
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


def evaluation_batches(
    index: SplitIndex,
    *,
    settings: DataSettings,
    image_size: int,
    rank: int,
    world_size: int,
    micro_batch: int,
    pin_memory: bool,
    samples: np.ndarray | None = None,
) -> Generator[Batch, None, None]:
    """Every sample once over all ranks, in equally many batches per rank, as ZeRO-3 requires.

    samples: numbers of the samples to take, at least one; None: all.
    The last batches are padded with samples of weight 0.
    """
    chosen = np.arange(index.num_samples) if samples is None else samples
    stride = world_size * micro_batch
    num_batches = -(-len(chosen) // stride)
    shape = (num_batches, world_size, micro_batch)
    places = np.arange(num_batches * stride).reshape(shape)[:, rank]
    # Places beyond the end repeat the last sample, with weight 0.
    positions = chosen[np.minimum(places, len(chosen) - 1)]
    reader = EvaluationSamples(index, settings=settings, image_size=image_size)
    with open_batches(
        reader,
        positions.tolist(),
        batch=micro_batch,
        settings=settings,
        pin_memory=pin_memory,
    ) as batches:
        is_sample = places < len(chosen)
        for batch, counts, numbers in zip(batches, is_sample, positions, strict=True):
            weights = torch.from_numpy(counts.astype(np.float32))
            yield Batch(batch.images, batch.labels, weights, positions=numbers)


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
        size = samples.image_size
        images = torch.empty(batch, 3, size, size, dtype=torch.uint8)
        filled = ((images[: len(p)], *_fill(samples, p, images)) for p in positions)
        yield (_copied(each, pinned=pin_memory) for each in filled)


def _copied(filled: Filled, *, pinned: bool) -> Batch:
    """Copy a batch out of its slot. From pinned memory copies to the GPU are asynchronous; torch
    rounds it up to a power of two, thrice on a rank: 39 to 67 MB for 256 images of 224 px."""
    slot, numbers, unreadable = filled
    labels = torch.tensor(numbers)
    weights = torch.ones(len(numbers))
    if pinned:
        labels = labels.pin_memory()
        weights = weights.pin_memory()
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


class _Memory(NamedTuple):
    """The layout of the memory that a rank shares with its workers."""

    num_workers: int
    slots: tuple[int, ...]
    """Shape of the slots, uint8 [slots, batch, 3, rows, columns]."""

    @property
    def progress_offset(self) -> int:
        return -(-math.prod(self.slots) // COUNTER_BYTES) * COUNTER_BYTES

    @property
    def num_bytes(self) -> int:
        return self.progress_offset + self.num_workers * COUNTER_BYTES

    def map(self, descriptor: int) -> tuple[torch.Tensor, np.ndarray]:
        """The slots; and int64 [workers], how many steps of its work each has done.

        When batch n is read, workers have at most batch n + num_workers * PREFETCH, so none writes
        to the slot that is being read.
        """
        memory = mmap.mmap(descriptor, self.num_bytes)
        num_pixels = math.prod(self.slots)
        slots = torch.frombuffer(memory, dtype=torch.uint8, count=num_pixels).view(
            self.slots
        )
        return slots, np.frombuffer(memory, np.int64, offset=self.progress_offset)


@contextmanager
def _filled_by_workers(
    samples: Samples, positions: Iterable[Sequence[int]], batch: int, num_workers: int
) -> Iterator[Iterator[Filled]]:
    """The batches in order; batch n comes from worker n modulo their number."""
    # One more than the batches ahead: the one that is being read.
    num_slots = num_workers * PREFETCH + 1
    shape = (num_slots, batch, 3, samples.image_size, samples.image_size)
    layout = _Memory(num_workers, shape)
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
        os.ftruncate(memory, layout.num_bytes)
        slots, progress = layout.map(memory)
        for number in range(num_workers):
            workers.append(_started(memory, samples, layout, number))
        for _ in range(PREFETCH * num_workers):
            assign()
        yield filled()
    finally:
        os.close(memory)
        for worker in workers:  # waits for none
            worker.process.kill()
            worker.connection.close()


def _started(memory: int, samples: Samples, layout: _Memory, number: int) -> _Worker:
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


def _run(
    connection: Connection, samples: Samples, layout: _Memory, number: int
) -> None:
    """Fill slots, whose descriptor comes through the pipe, until the trainer is gone."""
    end_with_server()
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    torch.set_num_threads(1)
    with suppress(EOFError, ConnectionError):
        slots, progress = layout.map(reduction.recv_handle(connection))

        def advance() -> None:
            progress[number] += 1

        remote.on_part_fetched = advance
        samples.start(worker=number, num_workers=layout.num_workers)
        while True:
            slot, positions = connection.recv()
            reply: Labels | Exception
            try:
                reply = _fill(samples, positions, slots[slot], advance)
            except RankError as error:
                reply = error
            except Exception:
                reply = RuntimeError(
                    f"a loader worker failed:\n{traceback.format_exc()}"
                )
            connection.send(reply)
    # Threads that read ahead may wait for the network.
    os._exit(0)


# ---- Mixup and CutMix of a micro-batch, on its device -------------------------------------------
# Partners are the positions 2i and 2i + 1 of training, which are in one micro-batch on every layout
# if its size is even. Random numbers depend on the seed and the step (or pair) alone. So the mixed
# images are the same for any number of ranks and accumulated micro-batches.
# B batch, P pairs: B = 2 P


@dataclass(frozen=True, slots=True)
class Blend:
    """How the two images of a pair are mixed; each keeps `share` of its pixels or values."""

    share: float
    box: tuple[int, int, int, int] | None = None
    """(top, left, bottom, right) of the box taken from the partner; None: Mixup of all pixels."""


def mix_batch(
    batch: Batch, settings: MixingSettings, *, seed: int, step: int, first_position: int
) -> Batch:
    """Mix images (float32, 0..255) and set `mixed_labels` and `mix_lambda`.

    first_position: position in training of the batch's first sample; even.
    """
    num, _, _, side = batch.images.shape
    assert num % 2 == 0 and first_position % 2 == 0, (
        "the training plan must refuse this"
    )
    if settings.mode == "batch":
        keys = [stream_key("mix", seed, step)]
    else:
        first = first_position // 2
        pairs = range(first, first + num // 2)
        keys = [stream_key("mix pair", seed, pair) for pair in pairs]
    blends = [draw_blend(settings, key, image_size=side) for key in keys]
    shares = [blend.share for blend in blends] * (num // 2 // len(blends))
    return replace(
        batch,
        images=mix_images(batch.images, blends),
        mixed_labels=batch.labels.view(-1, 2).flip(1).flatten(),
        mix_lambda=on_device(shares, batch.images.device).repeat_interleave(2),
    )


def draw_blend(settings: MixingSettings, key: int, *, image_size: int) -> Blend:
    """Mixup or CutMix, and how much: a function of `key`."""
    random = CounterRandom(key)
    mixup = settings.mixup_alpha
    cutmix = settings.cutmix_alpha
    switched = random.uniform() < 0.5
    if mixup is not None and (cutmix is None or not switched):
        share = symmetric_beta(mixup, random)
        # The larger share, as in AugReg. Each image of a pair is the main one once, so the smaller
        # share would give the same two images.
        return Blend(max(share, 1 - share))
    assert cutmix is not None
    return cutmix_box(symmetric_beta(cutmix, random), random, image_size=image_size)


def cutmix_box(share: float, random: CounterRandom, *, image_size: int) -> Blend:
    """A square box around a random pixel, clipped at the border; the share is its true area's.

    Source: Yun et al. 2019, eq. 2; rounding as in timm.
    """
    side = int(image_size * math.sqrt(1 - share))

    def span() -> tuple[int, int]:
        middle = int(random.uniform() * image_size)
        return max(middle - side // 2, 0), min(middle + (side + 1) // 2, image_size)

    top, bottom = span()
    left, right = span()
    area = (bottom - top) * (right - left)
    return Blend(1 - area / image_size**2, (top, left, bottom, right))


def on_device(values: list[Any] | np.ndarray, device: torch.device) -> torch.Tensor:
    """A tensor of numbers of the host. A GPU gets it without being waited for."""
    pinned = torch.tensor(values, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)


def mix_images(images_B3SS: torch.Tensor, blends: list[Blend]) -> torch.Tensor:
    """Mix each image with its partner; float32, not rounded. blends: one per pair, or for all."""
    device = images_B3SS.device
    rows, columns = images_B3SS.shape[-2:]
    keep_P = on_device([1.0 if blend.box else blend.share for blend in blends], device)
    keep_P11SS = keep_P.view(-1, 1, 1, 1, 1)
    if any(blend.box for blend in blends):
        # Made on the device: copying a mask per pair would be slow.
        boxes_P4 = on_device([blend.box or (0, 0, 0, 0) for blend in blends], device)
        top, left, bottom, right = boxes_P4[:, :, None].unbind(1)
        row_R = torch.arange(rows, device=device)
        column_C = torch.arange(columns, device=device)
        rows_PR = (row_R >= top) & (row_R < bottom)
        columns_PC = (column_C >= left) & (column_C < right)
        cut_PSS = rows_PR[:, :, None] & columns_PC[:, None, :]
        keep_P11SS = keep_P11SS * ~cut_PSS[:, None, None]
    own_P23SS = images_B3SS.float().unflatten(0, (-1, 2))
    # Exact at weights 0 and 1, so CutMix copies pixels unchanged.
    return torch.lerp(own_P23SS.flip(1), own_P23SS, keep_P11SS).flatten(0, 1)


def symmetric_beta(alpha: float, random: CounterRandom) -> float:
    """An exact draw from Beta(alpha, alpha).

    alpha < 1: Joehnk 1964, in logarithms, because powers of 1 / alpha underflow. alpha >= 1:
    Ulrich 1984. Source of both: Devroye 1986, ch. IX.3 and IX.4.
    """
    if alpha >= 1:
        u, v = random.uniform(), random.uniform()
        radius = math.sqrt(1 - u ** (2 / (2 * alpha - 1)))
        return (1 + radius * math.cos(2 * math.pi * v)) / 2
    while True:
        x = math.log(1 - random.uniform()) / alpha
        y = math.log(1 - random.uniform()) / alpha
        if math.exp(x) + math.exp(y) <= 1:
            # exp(x) / (exp(x) + exp(y)), written so that neither overflows.
            odds = math.exp(-abs(x - y))
            return 1 / (1 + odds) if x >= y else odds / (1 + odds)
