"""Similarity of positions equals direct computation; tiles are where their labels say."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from finetune.inspection.pictures.position_similarity import (
    position_similarity,
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
