"""Shared memory for batches: a ring of slots that workers fill and the trainer reads.

Leaves out: the worker processes (`loader`).

DataLoader would send the memory of each batch through a socket of the worker; the trainer would
block for ever on that socket if the worker stops or dies during the read. With slots a worker only
sends a number.
"""

from __future__ import annotations

import math
import os

import torch

from vitscale.config.errors import UserError
from vitscale.images.size import ImageSize, rows_and_columns

SHARED_MEMORY = "/dev/shm"
# Batches that DataLoader lets each worker prepare ahead.
PREFETCH = 2


class BatchSlots:
    """Slots for all prefetched batches and the one being read; shared by all processes."""

    def __init__(self, *, num_workers: int, batch: int, image_size: ImageSize) -> None:
        self.num_slots = num_workers * PREFETCH + 1
        shape = (self.num_slots, batch, 3, *rows_and_columns(image_size))
        _check_free(math.prod(shape))
        self.images = torch.empty(shape, dtype=torch.uint8).share_memory_()

    def slot_of(self, number: int) -> int:
        """Slot of a batch.

        When DataLoader returns batch n, it has assigned at most batch n + num_workers * PREFETCH,
        so no worker writes to a slot that is being read.
        """
        return number % self.num_slots


def _check_free(num_bytes: int) -> None:
    if not os.path.isdir(SHARED_MEMORY):
        return
    status = os.statvfs(SHARED_MEMORY)
    free = status.f_bavail * status.f_frsize
    if free < num_bytes:
        raise UserError(
            f"the loader needs {num_bytes >> 20} MiB of shared memory, {free >> 20} MiB are free",
            where=SHARED_MEMORY,
            next_step="enlarge it (docker: --shm-size; mount -o remount,size=...), or lower "
            "data.num_workers or engine.max_micro_batch",
        )
