"""Load batches in worker processes, from any position of training.

Owns: batches, worker processes, and errors when a worker dies or hangs.
Leaves out: the order (`order`), single samples (`samples`), normalisation (`engine`).
"""

from __future__ import annotations

import signal
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from vitscale.config.errors import RankError, UserError
from vitscale.data.batch_slots import PREFETCH, BatchSlots
from vitscale.data.index import SplitIndex
from vitscale.data.order import rank_batches
from vitscale.data.samples import (
    EvaluationSamples,
    StreamedSamples,
    TrainingSamples,
    Unreadable,
)
from vitscale.data.settings import DataSettings
from vitscale.data.training_set import TrainingSet
from vitscale.distributed.processes import process_state
from vitscale.images.size import ImageSize, rows_and_columns

# How long to wait for the exit code of a worker whose connection broke.
EXIT_WAIT_S = 5.0
# A worker hangs after this many consecutive timeouts of timeout_s / TIMEOUT_PARTS. If the machine
# is suspended, only one timeout expires, however long the pause.
TIMEOUT_PARTS = 4


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
    """int64 [B]: in training the positions of the images in training, counted from 0, so that
    random draws do not depend on the number of ranks; in an evaluation their numbers in the
    split."""

    def to(self, device: torch.device) -> Batch:
        return Batch(
            self.images.to(device, non_blocking=True),
            self.labels.to(device, non_blocking=True),
            self.weights.to(device, non_blocking=True),
            self.unreadable,
        )

    def keep_for(self, stream: torch.cuda.Stream) -> None:
        """Once freed, a GPU's memory is used again only after what this stream does until then."""
        for tensor in (self.images, self.labels, self.weights):
            tensor.record_stream(stream)


class Samples(Protocol):
    """Fills one image into a row of a batch; returns its label and unreadable samples."""

    image_size: ImageSize

    def prefetch(self, positions: Sequence[int]) -> None: ...

    def fill(self, position: int, out: torch.Tensor) -> tuple[int, list[Unreadable]]: ...


@dataclass(frozen=True, slots=True)
class _Filled:
    """A batch in a slot. Holds no tensors: each would be sent through a socket."""

    slots: int
    slot: int
    labels: tuple[int, ...]
    unreadable: tuple[Unreadable, ...]

    def read(self, *, pinned: bool) -> Batch:
        images = _SLOTS[self.slots].images[self.slot, : len(self.labels)]
        images = images.pin_memory() if pinned else images.clone()
        labels, weights = torch.tensor(self.labels), torch.ones(len(self.labels))
        if pinned:
            labels, weights = labels.pin_memory(), weights.pin_memory()
        return Batch(images, labels, weights, self.unreadable)

    def pin_memory(self) -> Batch:
        """Called in DataLoader's pin-memory thread, so that copies to the GPU are asynchronous."""
        return self.read(pinned=True)


# Slots of each open loader, by id: a training and an evaluation loader are open at once.
_SLOTS: dict[int, BatchSlots] = {}


class _Batches(Dataset[Batch | _Filled | UserError]):
    """A dataset whose items are whole batches, decoded in place."""

    def __init__(self, samples: Samples, slots: BatchSlots | None) -> None:
        self.samples, self.slots, self.slots_id = samples, slots, id(slots)

    def __getitems__(self, numbers: Sequence[int]) -> Batch | _Filled | UserError:
        """numbers: the batch number, then its positions."""
        number, *positions = numbers
        shape = rows_and_columns(self.samples.image_size)
        if self.slots is None:
            images = torch.empty(len(positions), 3, *shape, dtype=torch.uint8)
        else:
            images = self.slots.images[self.slots.slot_of(number)]
        labels, unreadable = [], []
        self.samples.prefetch(positions)
        try:
            for row, position in zip(images, positions, strict=False):
                label, skipped = self.samples.fill(position, row)
                labels.append(label)
                unreadable += skipped
        except UserError as error:
            # Returned, not raised: DataLoader would wrap it in a worker's traceback.
            return error
        if self.slots is None:
            weights = torch.ones(len(labels))
            return Batch(images, torch.tensor(labels), weights, tuple(unreadable))
        slot = self.slots.slot_of(number)
        return _Filled(self.slots_id, slot, tuple(labels), tuple(unreadable))


def _identity(batch: object) -> object:
    return batch


def _start_worker(worker: int) -> None:
    """Ignore signals meant for the trainer; use one thread per worker."""
    for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)


def _loader(
    samples: Samples,
    positions: Sequence[Sequence[int]],
    *,
    batch: int,
    settings: DataSettings,
    pin_memory: bool,
) -> DataLoader[Batch]:
    slots = None
    if settings.num_workers:
        slots = BatchSlots(
            num_workers=settings.num_workers, batch=batch, image_size=samples.image_size
        )
        _SLOTS[id(slots)] = slots
    return DataLoader(
        _Batches(samples, slots),  # type: ignore[arg-type]  # stubs take items for samples
        batch_sampler=_Numbered(positions),
        num_workers=settings.num_workers,
        prefetch_factor=PREFETCH if settings.num_workers else None,
        collate_fn=_identity,
        pin_memory=pin_memory,
        worker_init_fn=_start_worker,
        # Other methods would pickle the index for every worker.
        multiprocessing_context="fork" if settings.num_workers else None,
        timeout=settings.timeout_s / TIMEOUT_PARTS if settings.num_workers else 0,
    )


class _Numbered:
    """Prefixes each batch of positions with the batch number."""

    def __init__(self, positions: Sequence[Sequence[int]]) -> None:
        self.positions = positions

    def __len__(self) -> int:
        return len(self.positions)

    def __iter__(self) -> Iterator[list[int]]:
        for number, positions in enumerate(self.positions):
            yield [number, *positions]


class _PositionBatches(Sequence[list[int]]):
    """`rank_batches` as a lazy sequence with a length, as DataLoader needs."""

    def __init__(self, **span: int) -> None:
        self.span = span

    def __iter__(self) -> Iterator[list[int]]:
        return rank_batches(**self.span)

    def __len__(self) -> int:
        span = self.span
        return (span["stop"] - span["start"]) // (span["world_size"] * span["micro_batch"])

    def __getitem__(self, number: int) -> list[int]:  # type: ignore[override]  # no slices needed
        raise NotImplementedError


def training_batches(
    training_set: TrainingSet,
    *,
    settings: DataSettings,
    image_size: ImageSize,
    seed: int,
    start: int,
    stop: int,
    rank: int,
    world_size: int,
    micro_batch: int,
    pin_memory: bool,
) -> DataLoader[Batch]:
    """Micro-batches of one rank between two positions of training (samples seen).

    The position decides which samples they have; of streamed tars only how many.
    """
    positions = _PositionBatches(
        start=start, stop=stop, rank=rank, world_size=world_size, micro_batch=micro_batch
    )
    samples: Samples
    if training_set.streamed is None:
        samples = TrainingSamples(training_set, settings=settings, image_size=image_size, seed=seed)
    else:
        samples = StreamedSamples(
            training_set.streamed,
            settings=settings,
            image_size=image_size,
            seed=seed,
            start=start,
            rank=rank,
            world_size=world_size,
        )
    return _loader(samples, positions, batch=micro_batch, settings=settings, pin_memory=pin_memory)


def evaluation_batches(
    index: SplitIndex,
    *,
    settings: DataSettings,
    image_size: ImageSize,
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
    own = np.arange(num_batches * stride).reshape(num_batches, world_size, micro_batch)[:, rank]
    positions = chosen[np.minimum(own, len(chosen) - 1)].tolist()
    reader = EvaluationSamples(index, settings=settings, image_size=image_size)
    batches = batches_of(reader, positions, settings=settings, pin_memory=pin_memory)
    with closing(batches):
        for batch, stored in zip(batches, own, strict=True):
            weights = torch.from_numpy((stored < len(chosen)).astype(np.float32))
            numbers = chosen[np.minimum(stored, len(chosen) - 1)]
            yield Batch(batch.images, batch.labels, weights, positions=numbers)


def batches_of(
    samples: Samples,
    positions: Sequence[Sequence[int]],
    *,
    settings: DataSettings,
    pin_memory: bool,
) -> Generator[Batch, None, None]:
    """One batch for each list of positions, in order; the first list is the longest."""
    size = len(positions[0]) if positions else 0
    loader = _loader(samples, positions, batch=size, settings=settings, pin_memory=pin_memory)
    with open_loader(loader) as batches:
        yield from batches


@contextmanager
def open_loader(loader: DataLoader[Batch]) -> Iterator[Iterator[Batch]]:
    """Iterate over a loader; stop its workers at the end of the block.

    Workers ignore SIGTERM, so Python's clean-up at exit would wait for them for ever.
    Raises RankError, naming the worker, if one dies or gives no batch for `data.timeout_s`.
    """
    batches = iter(loader)
    try:
        yield _watched(batches, timeout_s=loader.timeout * TIMEOUT_PARTS)
    finally:
        for worker in getattr(batches, "_workers", ()):  # absent without workers
            if worker.is_alive() and not _responds(worker.pid):
                # When a worker is killed, torch's SIGCHLD handler raises in the running code.
                with suppress(RuntimeError):
                    worker.kill()
                    worker.join(EXIT_WAIT_S)
        shutdown = getattr(batches, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()
        _SLOTS.pop(getattr(loader.dataset, "slots_id", 0), None)


def _watched(
    batches: Iterator[Batch | _Filled | UserError], *, timeout_s: float
) -> Iterator[Batch]:
    num_timeouts = 0
    while True:
        try:
            batch = next(batches)
            num_timeouts = 0
        except StopIteration:
            return
        except (RuntimeError, OSError, EOFError) as error:
            num_timeouts += 1
            if _is_timeout(error) and num_timeouts < TIMEOUT_PARTS:
                continue
            # OSError, EOFError: a worker died while sending.
            raise _worker_error(batches, error, timeout_s=timeout_s) from None
        if isinstance(batch, UserError):
            # RankError: the other ranks do not know about this error.
            raise RankError(
                batch.what, where=batch.where, allowed=batch.allowed, next_step=batch.next_step
            )
        yield batch.read(pinned=False) if isinstance(batch, _Filled) else batch


def _worker_error(batches: object, error: Exception, *, timeout_s: float) -> Exception:
    """A RankError that names dead or hung workers; any other error unchanged."""
    workers = getattr(batches, "_workers", [])
    if isinstance(error, OSError | EOFError) or "is killed by signal" in str(error):
        wait([worker.sentinel for worker in workers], timeout=EXIT_WAIT_S)
    dead = [worker for worker in workers if not worker.is_alive()]
    if dead:
        codes = ", ".join(f"{worker.name} (pid {worker.pid}): {worker.exitcode}" for worker in dead)
        return RankError(
            f"a loader worker died; exit codes: {codes}",
            where="data.num_workers",
            next_step="exit code -9 usually means the OOM killer: lower data.num_workers or raise "
            "the job's memory; -7 means full shared memory: enlarge /dev/shm (docker: --shm-size)",
        )
    if not _is_timeout(error):
        return error
    task = getattr(batches, "_task_info", {}).get(getattr(batches, "_rcvd_idx", None), (None,))
    # A stopped worker may hold the lock that the worker next in turn needs to send its batch.
    slow = [
        f"{worker.name} (pid {worker.pid}, {process_state(worker.pid)})"
        for number, worker in enumerate(workers)
        if number == task[0] or process_state(worker.pid) == "stopped"
    ]
    return RankError(
        f"{', '.join(slow) or 'a loader worker'} gave no batch for {timeout_s:g} s",
        where="data.timeout_s",
        next_step="check the storage of the shards; raise data.timeout_s if it is only slow "
        "(py-spy dump --pid PID shows what a worker is doing)",
    )


def _is_timeout(error: Exception) -> bool:
    return "timed out" in str(error)


def _responds(pid: int) -> bool:
    """False for a process that is stopped or waits for dead storage: it would never exit."""
    return process_state(pid) in ("running", "sleeping")
