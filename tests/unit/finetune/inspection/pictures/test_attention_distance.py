"""Mean attention distance: known for identity and uniform attention, else as in a slow loop."""

from __future__ import annotations

import math

import pytest
import torch

from finetune.inspection.attention import read_attention
from finetune.inspection.pictures.attention_distance import (
    head_distances,
    mean_distance,
    patch_distances,
)
from tests.support.engine.vit_models import inference_model, random_images


def test_identity_attention_has_distance_zero() -> None:
    distances = patch_distances((3, 4), stride=16)
    assert mean_distance(torch.eye(12)[None], distances).tolist() == [0.0]


def test_uniform_attention_has_the_mean_pairwise_distance() -> None:
    """116.49 px: 14 x 14 patches of 16 px, pairs of a patch with itself included."""
    distances = patch_distances((14, 14), stride=16)
    uniform = torch.full((2, 196, 196), 1 / 196)
    places = [(16 * row, 16 * column) for row in range(14) for column in range(14)]
    pairs = [math.dist(one, other) for one in places for other in places]
    expected = sum(pairs) / len(pairs)
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
