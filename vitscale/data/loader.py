"""Batches of images from shard folders, resumable at any position.

Owns: batches, worker processes, and what happens when one of them dies or hangs.
Leaves out: the order (`order`), single samples (`samples`), normalising (`engine`).
"""

from __future__ import annotations

import signal
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
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
from vitscale.data.samples import EvaluationSamples, TrainingSamples, Unreadable
from vitscale.data.settings import DataSettings
from vitscale.data.training_set import TrainingSet
from vitscale.distributed.processes import process_state

# From a broken connection to an exit code.
DYING_S = 5.0
# That many times in a row no batch has come before a worker is given up: to a machine that stood
# still meanwhile it was one look, however long.
LOOKS = 4


@dataclass(frozen=True, slots=True)
class Batch:
    """B images of one rank."""

    images: torch.Tensor
    """uint8 [B, 3, S, S]"""
    labels: torch.Tensor
    """int64 [B]"""
    weights: torch.Tensor
    """float32 [B]: 1 for a sample, 0 for the padding of an evaluation's last batch."""
    unreadable: tuple[Unreadable, ...] = ()
    """Samples that others stand in for."""
    mixed_labels: torch.Tensor | None = None
    """int64 [B], with mixing: labels of the images mixed in."""
    mix_lambda: torch.Tensor | None = None
    """float32 [B], with mixing: how much of each image is its own."""

    def to(self, device: torch.device) -> Batch:
        return Batch(
            self.images.to(device, non_blocking=True),
            self.labels.to(device, non_blocking=True),
            self.weights.to(device, non_blocking=True),
            self.unreadable,
        )


class Samples(Protocol):
    """Fills one image into a row of a batch; returns its label and what could not be read."""

    image_size: int

    def announce(self, positions: Sequence[int]) -> None: ...

    def fill(self, position: int, out: torch.Tensor) -> tuple[int, list[Unreadable]]: ...


@dataclass(frozen=True, slots=True)
class _Filled:
    """A batch that a worker has left in a slot. No tensors: those would need a socket each."""

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
        """Called in DataLoader's thread, so that copies to the GPU do not wait."""
        return self.read(pinned=True)


# The slots of each loader at work, for `_Filled` to find them; by loader, since one trains while
# another evaluates.
_SLOTS: dict[int, BatchSlots] = {}


class _Batches(Dataset[Batch | _Filled | UserError]):
    """A dataset whose items are whole batches, decoded into their final place."""

    def __init__(self, samples: Samples, slots: BatchSlots | None) -> None:
        self.samples, self.slots, self.slots_id = samples, slots, id(slots)

    def __getitems__(self, numbers: Sequence[int]) -> Batch | _Filled | UserError:
        """`numbers`: the batch's, then the positions in it."""
        number, *positions = numbers
        size = self.samples.image_size
        if self.slots is None:
            images = torch.empty(len(positions), 3, size, size, dtype=torch.uint8)
        else:
            images = self.slots.images[self.slots.slot_of(number)]
        labels, unreadable = [], []
        self.samples.announce(positions)
        try:
            for row, position in zip(images, positions, strict=False):
                label, lost = self.samples.fill(position, row)
                labels.append(label)
                unreadable += lost
        except UserError as error:
            # Returned: DataLoader would wrap what a worker raises in a traceback.
            return error
        if self.slots is None:
            weights = torch.ones(len(labels))
            return Batch(images, torch.tensor(labels), weights, tuple(unreadable))
        slot = self.slots.slot_of(number)
        return _Filled(self.slots_id, slot, tuple(labels), tuple(unreadable))


def _unchanged(batch: object) -> object:
    return batch


def _start_worker(worker: int) -> None:
    """Leave the signals meant for the trainer to the trainer; keep each worker to one thread."""
    for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)


def _loader(
    samples: Samples,
    positions: Sequence[list[int]],
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
        collate_fn=_unchanged,
        pin_memory=pin_memory,
        worker_init_fn=_start_worker,
        timeout=settings.timeout_s / LOOKS if settings.num_workers else 0,
    )


class _Numbered:
    """Batches of positions, each led by its number."""

    def __init__(self, positions: Sequence[list[int]]) -> None:
        self.positions = positions

    def __len__(self) -> int:
        return len(self.positions)

    def __iter__(self) -> Iterator[list[int]]:
        for number, positions in enumerate(self.positions):
            yield [number, *positions]


class _PositionBatches(Sequence[list[int]]):
    """`rank_batches` as the lazily read sequence that DataLoader samples from."""

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
    image_size: int,
    seed: int,
    start: int,
    stop: int,
    rank: int,
    world_size: int,
    micro_batch: int,
    pin_memory: bool,
) -> DataLoader[Batch]:
    """Micro-batches of one rank between two positions (samples seen) of training."""
    positions = _PositionBatches(
        start=start, stop=stop, rank=rank, world_size=world_size, micro_batch=micro_batch
    )
    samples = TrainingSamples(training_set, settings=settings, image_size=image_size, seed=seed)
    return _loader(samples, positions, batch=micro_batch, settings=settings, pin_memory=pin_memory)


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
    """Every sample once over all ranks; all ranks get equally many batches (ZeRO-3 needs that).

    samples: numbers of the samples to take, at least one; None: all.
    The last batches are filled up with padding of weight 0.
    """
    chosen = np.arange(index.num_samples) if samples is None else samples
    stride = world_size * micro_batch
    num_batches = -(-len(chosen) // stride)
    own = np.arange(num_batches * stride).reshape(num_batches, world_size, micro_batch)[:, rank]
    positions = chosen[np.minimum(own, len(chosen) - 1)].tolist()
    reader = EvaluationSamples(index, settings=settings, image_size=image_size)
    loader = _loader(reader, positions, batch=micro_batch, settings=settings, pin_memory=pin_memory)
    with open_loader(loader) as batches:
        for batch, stored in zip(batches, own, strict=True):
            weights = torch.from_numpy((stored < len(chosen)).astype(np.float32))
            yield Batch(batch.images, batch.labels, weights)


@contextmanager
def open_loader(loader: DataLoader[Batch]) -> Iterator[Iterator[Batch]]:
    """Iterate a loader and end its workers with the block.

    They ignore SIGTERM, so Python's own clean-up at exit would wait for them for ever.
    Raises UserError, naming the worker, when one dies or gives nothing for `data.timeout_s`.
    """
    batches = iter(loader)
    try:
        yield _watched(batches, timeout_s=loader.timeout * LOOKS)
    finally:
        for worker in getattr(batches, "_workers", ()):  # absent without workers
            if worker.is_alive() and not _responds(worker.pid):
                # torch raises in the middle of whatever runs when a worker is killed.
                with suppress(RuntimeError):
                    worker.kill()
                    worker.join(DYING_S)
        shutdown = getattr(batches, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()
        _SLOTS.pop(getattr(loader.dataset, "slots_id", 0), None)


def _watched(
    batches: Iterator[Batch | _Filled | UserError], *, timeout_s: float
) -> Iterator[Batch]:
    looks = 0
    while True:
        try:
            batch = next(batches)
            looks = 0
        except StopIteration:
            return
        except (RuntimeError, OSError, EOFError) as error:
            looks += 1
            if _is_timeout(error) and looks < LOOKS:
                continue
            # OSError, EOFError: it died in the middle of a message.
            raise _worker_error(batches, error, timeout_s=timeout_s) from None
        if isinstance(batch, UserError):
            # Of this rank's samples: the others know nothing of it.
            raise RankError(
                batch.what, where=batch.where, allowed=batch.allowed, next_step=batch.next_step
            )
        yield batch.read(pinned=False) if isinstance(batch, _Filled) else batch


def _worker_error(batches: object, error: Exception, *, timeout_s: float) -> Exception:
    """For people, where a worker is at fault; anything else as it is."""
    workers = getattr(batches, "_workers", [])
    if isinstance(error, OSError | EOFError) or "is killed by signal" in str(error):
        wait([worker.sentinel for worker in workers], timeout=DYING_S)
    dead = [worker for worker in workers if not worker.is_alive()]
    if dead:
        codes = ", ".join(f"{worker.name} (pid {worker.pid}): {worker.exitcode}" for worker in dead)
        return RankError(
            f"a loader worker died; exit codes: {codes}",
            where="data.num_workers",
            next_step="-9 is mostly the system's memory killer: lower data.num_workers or ask for "
            "more memory; -7 is full shared memory: enlarge /dev/shm (docker: --shm-size)",
        )
    if not _is_timeout(error):
        return error
    task = getattr(batches, "_task_info", {}).get(getattr(batches, "_rcvd_idx", None), (None,))
    # A stopped one may hold the lock that the one whose turn it is needs to hand over its batch.
    slow = [
        f"{worker.name} (pid {worker.pid}, {process_state(worker.pid)})"
        for number, worker in enumerate(workers)
        if number == task[0] or process_state(worker.pid) == "stopped"
    ]
    return RankError(
        f"{', '.join(slow) or 'a loader worker'} gave no batch for {timeout_s:g} s",
        where="data.timeout_s",
        next_step="check the storage that the shards lie on; raise data.timeout_s if it is "
        "only slow (py-spy dump --pid PID shows where a worker is)",
    )


def _is_timeout(error: Exception) -> bool:
    return "timed out" in str(error)


def _responds(pid: int) -> bool:
    """A stopped process, or one that waits for dead storage, would never hear of the end."""
    return process_state(pid) in ("running", "sleeping")
