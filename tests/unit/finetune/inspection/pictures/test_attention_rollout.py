"""Rollout: the identity for identity layers, else the product of all layers."""

from __future__ import annotations

import torch

from finetune.inspection.attention import read_attention
from finetune.inspection.pictures.attention_rollout import (
    Rollout,
    attention_rollout,
    patch_weights,
)
from tests.support.engine.vit_models import inference_model, random_images


def test_rollout_of_identity_layers_is_the_identity() -> None:
    rollout = Rollout()
    for _ in range(3):
        rollout.add(torch.eye(5).repeat(2, 1, 1))
    assert rollout.product_BTT is not None
    assert torch.equal(rollout.product_BTT, torch.eye(5).repeat(2, 1, 1))


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


def test_weights_are_the_class_tokens_row_or_the_mean_of_patches() -> None:
    rollout = torch.tensor([[[0.4, 0.2, 0.4], [0.2, 0.5, 0.3], [0.0, 0.1, 0.9]]])
    options = {"num_prefix_tokens": 1, "grid": (1, 2)}
    of_class = patch_weights(rollout, pooled=False, **options)  # type: ignore[arg-type]  # as named
    torch.testing.assert_close(of_class, torch.tensor([[[0.5, 1.0]]]))
    of_patches = patch_weights(rollout, pooled=True, **options)  # type: ignore[arg-type]  # as named
    torch.testing.assert_close(of_patches, torch.tensor([[[0.5, 1.0]]]))
