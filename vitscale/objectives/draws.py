"""Random draws of objectives: made on the host from counters, then copied to the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vitscale.distributed.random_numbers import GOLDEN, splitmix


def uniform_rows(positions: np.ndarray, *, num: int, key: int) -> np.ndarray:
    """Uniform numbers in [0, 1), float64 [B, num]; row i is a function of key and positions[i].

    positions: int64 [B].
    """
    starts_B1 = splitmix(
        np.uint64(key) + positions.astype(np.uint64) * np.uint64(GOLDEN), 1
    )
    return (splitmix(starts_B1[:, 0], num) >> np.uint64(11)) * 2.0**-53


def on_device(values: list[Any] | np.ndarray, device: torch.device) -> torch.Tensor:
    """A tensor of numbers of the host. A GPU gets it without being waited for."""
    pinned = torch.tensor(values, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)
