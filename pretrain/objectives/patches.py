"""Patches of pixels, and random orders of patches: what masked objectives share.

Shapes: B images, S pixels a side, L patches in rows of the grid, P values of a patch, K some
patches, X values of any kind.
"""

from __future__ import annotations

import math

import numpy as np
import torch


def to_patches(images_B3SS: torch.Tensor, *, patch_size: int) -> torch.Tensor:
    """Cut images into patches [B, L, P], values in the order row, column, channel.

    The channel is last, unlike in the kernel of the patch embedding.
    """
    # Each side is cut in two, patches and pixels; then the two of a kind come together.
    tiles = images_B3SS.unflatten(3, (-1, patch_size)).unflatten(2, (-1, patch_size))
    return tiles.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def to_images(patches_BLP: torch.Tensor, *, grid: tuple[int, int]) -> torch.Tensor:
    """The inverse of `to_patches`: images [B, 3, S, S]."""
    side = math.isqrt(patches_BLP.shape[2] // 3)
    tiles = patches_BLP.unflatten(2, (side, side, 3)).unflatten(1, grid)
    return tiles.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)


def take_patches(values_BLX: torch.Tensor, index_BK: torch.Tensor) -> torch.Tensor:
    """The patches `index_BK` of each image [B, K, X]."""
    index_BKX = index_BK[:, :, None].expand(-1, -1, values_BLX.shape[2])
    return values_BLX.gather(1, index_BKX)


def random_orders(draws_BL: np.ndarray) -> np.ndarray:
    """A permutation of range(L) for each row of uniform numbers; int64 [B, L].

    On the CPU in float64 and stable: in half precision numbers of one row are equal, and devices
    order equal numbers differently.
    """
    return np.argsort(draws_BL, axis=1, kind="stable")
