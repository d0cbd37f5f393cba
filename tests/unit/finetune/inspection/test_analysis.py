"""Attention, its distance and rollout, components and similarities equal slow computation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from timm.layers import StdConv2d
from timm.utils import AttentionExtract
from torch import nn

from finetune.inspection.attention import (
    attention_modules,
    attention_rollout,
    head_distances,
    mean_distance,
    patch_attention,
    patch_distances,
    patch_weights,
    read_attention,
    rolled_out,
)
from finetune.inspection.weights import first_filters, position_similarity, principal_components
from tests.support.engine.subjects import inference_model, random_images
from tests.support.peak_memory import peak_mib
from vitscale.models.positions import sincos_position_embedding


def test_attention_is_timms_although_fused() -> None:
    """timm's own extraction, in its graph mode, on the same fused modules."""
    model, images = inference_model(depth=2), random_images(2)
    assert all(each.fused_attn for each in attention_modules(model.network))
    found: dict[tuple[int, int], torch.Tensor] = {}
    read_attention(model, images, lambda layer, head, p: found.update({(layer, head): p.clone()}))
    for each in attention_modules(model.network):
        each.fused_attn = False
    extract = AttentionExtract(model.network, method="hook")
    with torch.no_grad():
        expected = extract(images / 127.5 - 1)
    assert len(found) == 2 * 2
    for (layer, head), p_BTT in found.items():
        of_timm = expected[f"blocks.{layer}.attn.attn_drop"][:, head]
        torch.testing.assert_close(p_BTT, of_timm, atol=1e-6, rtol=1e-5)


def test_prefix_tokens_are_left_out_and_rows_sum_to_one() -> None:
    attention = torch.tensor([[[0.2, 0.4, 0.4], [0.5, 0.1, 0.4], [1.0, 0.0, 0.0]]])
    among_patches = patch_attention(attention, num_prefix_tokens=1)
    torch.testing.assert_close(among_patches, torch.tensor([[[0.2, 0.8], [0.5, 0.5]]]))


def test_a_pass_takes_the_memory_of_one_head() -> None:
    """512 px: all maps of 6 layers and 16 heads would be 384 MiB, those of one layer 64 MiB.

    Measured 69 MiB, of which one map is 4 MiB; a layer's scores and their softmax add 128 MiB.
    """
    peak = peak_mib(
        imports="""
import torch
from finetune.inspection.attention import attention_rollout
from tests.support.engine.subjects import inference_model, random_images
torch.set_num_threads(1)
model = inference_model(image_size=512, patch_size=16, width=64, num_heads=16, depth=6)
images = random_images(1, size=512)
attention_rollout(inference_model(), random_images(1))
""",
        work="attention_rollout(model, images)",
    )
    assert peak < 110


def test_distances_of_known_attention() -> None:
    """Identity: 0 px. Uniform: 116.49 px on 14 x 14 patches of 16 px, as the mean of all pairs."""
    distances = patch_distances((14, 14), stride=16)
    assert mean_distance(torch.eye(196)[None], distances).tolist() == [0.0]
    uniform = torch.full((2, 196, 196), 1 / 196)
    places = [(16 * row, 16 * column) for row in range(14) for column in range(14)]
    expected = sum(math.dist(one, other) for one in places for other in places) / 196**2
    assert expected == pytest.approx(116.49, abs=0.005)
    assert mean_distance(uniform, distances).tolist() == pytest.approx([expected] * 2, rel=1e-6)


def test_heads_of_a_model_equal_a_slow_loop() -> None:
    """Batches of different sizes; a class token and registers; grids count rows first."""
    model = inference_model(depth=2, num_registers=2)
    images = random_images(3)
    found = head_distances(
        model, [images[:2], images[2:]], grid=(4, 4), stride=4, num_prefix_tokens=3
    )
    maps = {}
    read_attention(model, images, lambda layer, head, p: maps.update({(layer, head): p.clone()}))
    places = [(4 * row, 4 * column) for row in range(4) for column in range(4)]
    for (layer, head), p_BTT in maps.items():
        total = 0.0
        for rows in p_BTT[:, 3:, 3:].double():
            for place, row in zip(places, rows, strict=True):
                weighted = sum(
                    float(weight) * math.dist(place, other)
                    for weight, other in zip(row, places, strict=True)
                )
                total += weighted / float(row.sum()) / (3 * 16)
        assert float(found[layer, head]) == pytest.approx(total, rel=1e-5)


def test_rollout_is_the_product_of_all_layers() -> None:
    """Later layers on the left, of the mean of heads, half of it the identity."""
    model, images = inference_model(depth=3), random_images(2)
    maps: dict[int, list[torch.Tensor]] = {}
    read_attention(model, images, lambda layer, _, p: maps.setdefault(layer, []).append(p.clone()))
    expected = torch.eye(17, dtype=torch.float64).expand(2, -1, -1)
    for layer in range(3):
        mixed = 0.5 * torch.stack(maps[layer]).double().mean(dim=0) + 0.5 * torch.eye(17)
        expected = (mixed / mixed.sum(dim=-1, keepdim=True)) @ expected
    found = attention_rollout(model, images)
    torch.testing.assert_close(found, expected.float(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found.sum(dim=-1), torch.ones(2, 17))
    identity = torch.eye(5).repeat(2, 1, 1)
    assert torch.equal(rolled_out(identity.clone(), identity.clone()), identity)


def test_weights_are_the_class_tokens_row_or_the_mean_of_patches() -> None:
    rollout = torch.tensor([[[0.4, 0.2, 0.4], [0.2, 0.5, 0.3], [0.0, 0.1, 0.9]]])
    options = {"num_prefix_tokens": 1, "grid": (1, 2)}
    of_class = patch_weights(rollout, pooled=False, **options)  # type: ignore[arg-type]  # as named
    torch.testing.assert_close(of_class, torch.tensor([[[0.5, 1.0]]]))
    of_patches = patch_weights(rollout, pooled=True, **options)  # type: ignore[arg-type]  # as named
    torch.testing.assert_close(of_patches, torch.tensor([[[0.5, 1.0]]]))


# ---- weights -------------------------------------------------------------------------------------


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
