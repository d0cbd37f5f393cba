"""Positions of other grids against independent implementations."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from scipy.ndimage import zoom
from timm.layers import resample_abs_pos_embed

from vitscale.models.positions import (
    mae_position_embedding,
    resize_position_embedding,
    sincos_position_embedding,
)


def embedding(rows: int, columns: int, *, prefix: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(0)
    return torch.randn(prefix + rows * columns, 6, generator=random)


def scipy_zoom(grid_RCD: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    rows, columns, _ = grid_RCD.shape
    factors = (size[0] / rows, size[1] / columns, 1)
    return torch.from_numpy(zoom(grid_RCD.double().numpy(), factors, order=1)).float()


def timm_resample(grid_RCD: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    rows, columns, _ = grid_RCD.shape
    pos_1LD = grid_RCD.flatten(0, 1)[None]
    found = resample_abs_pos_embed(
        pos_1LD, new_size=list(size), old_size=[rows, columns], num_prefix_tokens=0
    )
    return found.reshape(*size, -1)


def cubic(grid_RCD: torch.Tensor, size: tuple[int, int], *, offset: float) -> torch.Tensor:
    """Cubic convolution (a = -0.75) along each side in float64, borders repeated.

    The side of an output pixel is M / (n + offset) input pixels.
    """

    def weights(num_in: int, num_out: int) -> np.ndarray:
        matrix = np.zeros((num_out, num_in))
        for out in range(num_out):
            centre = (out + 0.5) * num_in / (num_out + offset) - 0.5
            first = math.floor(centre)
            for each in range(first - 1, first + 3):
                far = abs(centre - each)
                if far <= 1:
                    weight = 1.25 * far**3 - 2.25 * far**2 + 1
                else:
                    weight = -0.75 * (far**3 - 5 * far**2 + 8 * far - 4)
                matrix[out, min(max(each, 0), num_in - 1)] += weight
        return matrix

    rows, columns, _ = grid_RCD.shape
    along_rows, along_columns = weights(rows, size[0]), weights(columns, size[1])
    grid = grid_RCD.double().numpy()
    return torch.from_numpy(np.einsum("ir,jc,rcd->ijd", along_rows, along_columns, grid)).float()


REFERENCES = {
    "google": scipy_zoom,
    "timm": timm_resample,
    "deit": partial(cubic, offset=0.0),
    "dinov2": partial(cubic, offset=0.1),
}


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("convention", REFERENCES)
def test_conventions_equal_independent_references(convention: str, prefix: int) -> None:
    """14 x 14 to the grids of 112 x 448 and 384 x 512 px, a smaller one, and from no square."""
    for source, target in (
        ((14, 14), (7, 28)),  # as many tokens
        ((14, 14), (24, 32)),
        ((14, 14), (9, 9)),
        ((4, 5), (3, 9)),
    ):
        pos_LD = embedding(*source, prefix=prefix)
        resized_LD = resize_position_embedding(
            pos_LD,
            source_grid=source,
            target_grid=target,
            num_prefix_tokens=prefix,
            convention=convention,
        )
        assert torch.equal(resized_LD[:prefix], pos_LD[:prefix])
        assert resized_LD.dtype == torch.float32
        expected = REFERENCES[convention](pos_LD[prefix:].reshape(*source, -1), target)
        found = resized_LD[prefix:].reshape(*target, -1)
        assert torch.allclose(found, expected, atol=1e-5), (source, target)


@pytest.mark.parametrize("grid", [(4, 4), (3, 7), (37, 37)])
def test_fixed_positions_equal_a_slow_table(grid: tuple[int, int]) -> None:
    """Columns first; big_vision's frequencies include 1 / 10,000, MAE's stop short of it."""
    for function, steps in ((sincos_position_embedding, 5), (mae_position_embedding, 6)):
        omega = [10_000.0 ** -(band / steps) for band in range(6)]
        slow = [
            [wave(place * o) for place in (x, y) for wave in (math.sin, math.cos) for o in omega]
            for y in range(grid[0])
            for x in range(grid[1])
        ]
        table = function(grid, width=24)
        assert table.dtype == torch.float32
        assert np.allclose(table.numpy(), np.array(slow), atol=1e-6)
