"""Patches of pixels, and random orders of patches: what masked objectives share.

Shapes: B images, S pixels a side, N patches in rows of the grid, p pixels a side of a patch.
"""

from __future__ import annotations

import numpy as np
import torch


def patch_pixels(images_B3SS: torch.Tensor, *, patch_size: int) -> torch.Tensor:
    """[B, 3, S, S] -> [B, N, p, p, 3], pixels as they are; those in no whole patch are left out."""
    p = patch_size
    rows, columns = (side // p for side in images_B3SS.shape[2:])
    whole = images_B3SS[:, :, : rows * p, : columns * p]
    return (
        whole.unflatten(3, (columns, p))
        .unflatten(2, (rows, p))
        .permute(0, 2, 4, 3, 5, 1)
        .flatten(1, 2)
    )


def images_of_patches(patches_BNPP3: torch.Tensor, *, grid: tuple[int, int]) -> torch.Tensor:
    """The inverse: [B, N, p, p, 3] -> images of the whole patches [B, 3, rows * p, columns * p]."""
    rows_first = patches_BNPP3.unflatten(1, grid).permute(0, 5, 1, 3, 2, 4)
    return rows_first.flatten(4, 5).flatten(2, 3)


def random_orders(draws_BN: np.ndarray) -> np.ndarray:
    """A permutation of range(N) for each row of uniform numbers; int64 [B, N].

    On the CPU in float64 and stable: in half precision numbers of one row are equal, and devices
    order equal numbers differently.
    """
    return np.argsort(draws_BN, axis=1, kind="stable")


def on_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy to the device without waiting for it."""
    tensor = torch.from_numpy(values)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
