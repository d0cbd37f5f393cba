"""Shared memory for batches: a ring of slots that workers fill and the trainer reads.

Leaves out: the worker processes (`pool`, `process`).

A worker that stops or dies can block nobody, since only small messages go through its pipe.
"""

from __future__ import annotations

import math
import mmap
import os

import torch

# Batches that each worker prepares ahead.
PREFETCH = 2
ALIGNMENT = 64


class BatchSlots:
    """Slots for all prefetched batches and the one being read; shared by all processes."""

    images: torch.Tensor
    """uint8 [slots, batch, 3, rows, columns]"""
    positions: torch.Tensor
    """int64 [slots, batch], written by the trainer."""
    labels: torch.Tensor
    """int64 [slots, batch]"""

    def __init__(
        self, *, num_workers: int, batch: int, image_size: int, descriptor: int | None = None
    ) -> None:
        """descriptor: of the slots of another process; None: new ones."""
        self.num_workers, self.batch, self.image_size = num_workers, batch, image_size
        self.num_slots = num_workers * PREFETCH + 1
        shape = (self.num_slots, batch, 3, image_size, image_size)
        num_numbers = self.num_slots * batch
        start = -(-math.prod(shape) // ALIGNMENT) * ALIGNMENT
        num_bytes = start + 2 * 8 * num_numbers
        if descriptor is None:
            # No file: the size of /dev/shm is no limit.
            descriptor = os.memfd_create("batches", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, num_bytes)
        self.descriptor = descriptor
        memory = mmap.mmap(descriptor, num_bytes)
        images = torch.frombuffer(memory, dtype=torch.uint8, count=math.prod(shape))
        numbers = torch.frombuffer(memory, dtype=torch.int64, offset=start)
        self.images = images.view(shape)
        self.positions, self.labels = numbers.view(2, self.num_slots, batch)

    def slot_of(self, number: int) -> int:
        """Slot of a batch.

        When batch n is read, workers have at most batch n + num_workers * PREFETCH, so no worker
        writes to a slot that is being read.
        """
        return number % self.num_slots

    def close(self) -> None:
        """Close the descriptor; the memory lives as long as a tensor shows it."""
        os.close(self.descriptor)
