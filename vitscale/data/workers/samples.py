"""What workers fill batches with: anything that writes single images.

Leaves out: reading them (`vitscale.data.samples`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch


class Unreadable(NamedTuple):
    """A sample that could not be read or decoded."""

    part: int
    """Which set of shards."""
    sample: int
    """Its number in that set; the trainer looks up the key, once."""
    shard: str
    error: str
    key: str | None = None
    """Its key where there is no index to look it up in."""


class Samples(Protocol):
    """Fills one image into a row of a batch; returns its label and unreadable samples."""

    image_size: int

    def start(self, *, worker: int, num_workers: int) -> None:
        """Called once in the process that reads, before it reads."""
        return

    def prefetch(self, positions: Sequence[int]) -> None:
        """Called with the positions of a batch, before they are filled."""
        return

    def fill(self, position: int, out: torch.Tensor) -> tuple[int, list[Unreadable]]:
        """Write an image into `out`, uint8 [3, rows, columns]."""
        ...
