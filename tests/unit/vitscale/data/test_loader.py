"""Batches of the loader: the memory that they are copied to."""

from __future__ import annotations

import torch

from vitscale.data.loader import _Memory


def test_memory_is_used_again_when_nothing_shows_it() -> None:
    memory, images = _Memory(), torch.arange(24, dtype=torch.uint8).view(2, 3, 2, 2)
    first = memory.copy(images)
    part, place = first[1, 0], first.data_ptr()
    del first
    second = memory.copy(images + 1)
    assert second.data_ptr() != place and part.tolist() == [[12, 13], [14, 15]]
    del part
    third = memory.copy(images + 2)
    assert third.data_ptr() == place and torch.equal(third, images + 2)
    assert torch.equal(second, images + 1)
    # Of another shape, and more than are kept.
    others = [memory.copy(images[:1] + number) for number in range(6)]
    assert [int(other[0, 0, 0, 0]) for other in others] == [0, 1, 2, 3, 4, 5]
    assert torch.equal(third, images + 2)
