"""Principal components of filters and similarity of positions equal direct computation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from timm.layers import StdConv2d
from torch import nn

from finetune.inspection.weights import first_filters, position_similarity, principal_components
from vitscale.models.positions import sincos_position_embedding


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_filters_of_rank_one_have_one_component() -> None:
    """Multiples of one filter, shifted by a common one, which PCA takes away."""
    direction, mean = random(2, 3, 2, 2)
    filters = mean + torch.linspace(-1, 3, 9)[:, None, None, None] * direction
    components, shares = principal_components(filters, count=28)
    assert components.shape == (1, 3, 2, 2)
    assert shares.tolist() == pytest.approx([1.0])
    cosine = nn.functional.cosine_similarity(components[0].flatten(), direction.flatten(), dim=0)
    assert abs(float(cosine)) == pytest.approx(1.0, abs=1e-6)
    assert float(components[0].abs().max()) == float(components[0].max())


def test_components_are_those_of_scikit_learn() -> None:
    filters = random(40, 3, 3, 3)
    components, shares = principal_components(filters, count=5)
    expected = PCA(n_components=5, svd_solver="full").fit(filters.flatten(1).double().numpy())
    assert shares.tolist() == pytest.approx(expected.explained_variance_ratio_.tolist())
    for component, other in zip(components.flatten(1), expected.components_, strict=True):
        assert abs(float(component @ torch.from_numpy(other))) == pytest.approx(1.0)


def test_the_first_filters_are_those_that_see_colours() -> None:
    network = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Conv2d(3, 4, 2), nn.Conv2d(3, 5, 1))
    found = first_filters(network)
    assert torch.equal(found, network[1].weight.detach().double())  # type: ignore[operator]  # a tensor
    standard = first_filters(StdConv2d(3, 4, 2)).flatten(1)
    torch.testing.assert_close(standard.mean(dim=1), torch.zeros(4, dtype=torch.float64))
    torch.testing.assert_close(standard.square().mean(dim=1), torch.ones(4, dtype=torch.float64))


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
