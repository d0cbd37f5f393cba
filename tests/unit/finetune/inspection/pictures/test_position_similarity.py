"""Similarity of positions equals direct computation; tiles are where their labels say."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from finetune.inspection.pictures.position_similarity import (
    position_similarity,
    spaced,
    tile_layout,
    tiled,
)
from vitscale.models.vit.position_embedding import sincos_position_embedding

GRID, WIDTH = (3, 5), 16


def test_similarity_of_fixed_positions_equals_direct_computation() -> None:
    """|e|^2 is half the width, and the product of two sums cos of their distance per frequency."""
    pos_LD = sincos_position_embedding(GRID, width=WIDTH)
    prefix = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(0))
    found = position_similarity(torch.cat([prefix, pos_LD]), grid=GRID)
    assert found.shape == (*GRID, *GRID)
    bands = WIDTH // 4
    frequencies = [10_000 ** -(i / (bands - 1)) for i in range(bands)]
    for (row, column, other_row, other_column), value in np.ndenumerate(found.numpy()):
        differences = (row - other_row, column - other_column)
        expected = sum(math.cos(w * d) for w in frequencies for d in differences) / (2 * bands)
        assert value == pytest.approx(expected, abs=1e-6)


def test_tiles_are_in_the_order_of_rows_and_columns() -> None:
    similarity = torch.arange(15.0)[:, None].expand(15, 15).unflatten(1, GRID).unflatten(0, GRID)
    canvas = tiled(similarity, rows=[0, 2], columns=[0, 1, 4])
    scale, gap = tile_layout(GRID)
    high, wide = 3 * scale + gap, 5 * scale + gap
    assert canvas.shape == (2 * high - gap, 3 * wide - gap)
    assert canvas[::high, ::wide].tolist() == [[0, 1, 4], [10, 11, 14]]
    assert np.isnan(canvas[3 * scale : high]).all()


@pytest.mark.parametrize("count", [1, 2, 14, 15, 37])
def test_shown_rows_include_the_first_and_the_last(count: int) -> None:
    rows = spaced(count)
    assert rows[0] == 0 and rows[-1] == count - 1
    assert len(set(rows)) == len(rows) <= 14
