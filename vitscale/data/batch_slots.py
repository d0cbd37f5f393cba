"""Memory that loader processes fill and the trainer reads: a ring of batches.

Owns: allocating it, and which batch lies where.
Leaves out: the processes (`loader`).

DataLoader would hand over each batch's memory through a socket of the worker, on which the trainer
waits for ever when the worker is stopped or dies at that moment. Here nothing is handed over; a
worker sends the number of a slot.
"""

from __future__ import annotations

import math
import os

import torch

from vitscale.config.errors import UserError

SHARED_MEMORY = "/dev/shm"
# Batches that DataLoader lets each worker be ahead.
PREFETCH = 2


class BatchSlots:
    """Room for the batches under way and the one being read; shared by all processes."""

    def __init__(self, *, num_workers: int, batch: int, image_size: int) -> None:
        self.num_slots = num_workers * PREFETCH + 1
        shape = (self.num_slots, batch, 3, image_size, image_size)
        _check_free(math.prod(shape))
        self.images = torch.empty(shape, dtype=torch.uint8).share_memory_()

    def slot_of(self, number: int) -> int:
        """Where the batch with this number lies: free again once the one before it was asked for.

        When batch n is returned, DataLoader has given out batch n + num_workers * PREFETCH at most.
        """
        return number % self.num_slots


def _check_free(num_bytes: int) -> None:
    if not os.path.isdir(SHARED_MEMORY):
        return
    status = os.statvfs(SHARED_MEMORY)
    free = status.f_bavail * status.f_frsize
    if free < num_bytes:
        raise UserError(
            f"the loader's batches need {num_bytes >> 20} MiB of shared memory, "
            f"{free >> 20} MiB are free",
            where=SHARED_MEMORY,
            next_step="enlarge it (docker: --shm-size; mount -o remount,size=...), or lower "
            "data.num_workers or engine.max_micro_batch",
        )
