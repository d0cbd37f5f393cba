"""The ring of batches in shared memory: refused without enough memory, never overwritten early."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from vitscale.config.errors import UserError
from vitscale.data.batch_slots import PREFETCH, SHARED_MEMORY, BatchSlots

MIB = 1 << 20


def test_too_little_shared_memory_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise a worker would die of SIGBUS during training."""
    asked = []
    room = {"blocks": 3 * 2 * 3}  # three slots of two images of 3 x 512 x 512 bytes, in quarter MiB

    def statvfs(path: str) -> SimpleNamespace:
        asked.append(path)
        return SimpleNamespace(f_bavail=room["blocks"], f_frsize=MIB // 4)

    monkeypatch.setattr(os, "statvfs", statvfs)
    slots = BatchSlots(num_workers=1, batch=2, image_size=512)
    assert slots.images.shape == (3, 2, 3, 512, 512) and slots.images.is_shared()
    room["blocks"] -= 1
    with pytest.raises(UserError, match=r"/dev/shm: .* needs 4 MiB .* 4 MiB are free(?s:.*)--shm"):
        BatchSlots(num_workers=1, batch=2, image_size=512)
    assert asked == [SHARED_MEMORY] * 2


@pytest.mark.parametrize("num_workers", [1, 3])
def test_no_prefetched_batch_shares_the_slot_being_read(num_workers: int) -> None:
    slots = BatchSlots(num_workers=num_workers, batch=1, image_size=2)
    for number in range(20):
        under_way = range(number, number + num_workers * PREFETCH + 1)
        assert len({slots.slot_of(each) for each in under_way}) == len(under_way)
