"""Patches of pixels and random orders."""

from __future__ import annotations

import numpy as np
import torch

from vitscale.models.objectives.patches import random_orders, to_images, to_patches


def test_patches_are_rows_of_the_grid_with_channels_last() -> None:
    images = torch.randint(0, 256, (2, 3, 12, 12), dtype=torch.uint8)
    patches = to_patches(images, patch_size=4)
    pixels = patches.unflatten(2, (4, 4, 3))
    assert pixels.shape == (2, 9, 4, 4, 3)
    for number in range(9):
        top, left = 4 * (number // 3), 4 * (number % 3)
        for y in range(4):
            for x in range(4):
                assert torch.equal(pixels[:, number, y, x], images[:, :, top + y, left + x])
    assert torch.equal(to_images(patches, grid=(3, 3)), images)


def test_equal_draws_keep_their_order() -> None:
    orders = random_orders(np.array([[0.5, 0.25, 0.5, 0.25]]))
    assert orders.tolist() == [[1, 3, 0, 2]]
