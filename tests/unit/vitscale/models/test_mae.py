"""The masked autoencoder against an independent slow version."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from vitscale.models.mae import (
    MaskedAutoencoder,
    encode_kept,
    picture_rows,
    reconstruction_loss,
)
from vitscale.models.patches import random_orders, to_patches
from vitscale.models.settings import ViTSettings
from vitscale.models.vit import build_model, checkpoint_activations, decayed

SMALL_DECODER = {"width": 8, "depth": 2, "num_heads": 2}
SMALL = ViTSettings(
    image_size=12, patch_size=4, width=16, depth=2, num_heads=2, mlp_width=24,
    positions="sincos2d_mae", weight_init="mae", gelu="erf",
)  # fmt: skip


def small_model(settings: ViTSettings = SMALL) -> Any:
    arch = settings.resolved(num_classes=0)
    torch.manual_seed(1)
    model: Any = build_model(arch, seed=0)
    model.objective = MaskedAutoencoder(arch, **SMALL_DECODER)
    for parameter in model.parameters():  # biases and norms too
        torch.nn.init.normal_(parameter, std=0.2)
    return model.double()


def slow_positions(side: int, width: int) -> torch.Tensor:
    """Columns first: sin, cos; then rows. omega_k = 10000 ** (-k / (width / 4))."""
    rows = []
    for row in range(side):
        for column in range(side):
            values = []
            for place in (column, row):
                angles = [place * 10_000 ** (-k / (width / 4)) for k in range(width // 4)]
                values += [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
            rows.append(values)
    return torch.tensor(rows, dtype=torch.float64)


def slow_loss(
    model: Any, images: torch.Tensor, noise: torch.Tensor, *, normalized: bool
) -> torch.Tensor:
    """MAE of image after image, patch after patch, for SMALL and SMALL_DECODER at 75 %.

    Blocks, norms and dense layers are the model's own.
    """
    side, p, losses, mae = 3, 4, [], model.objective
    embedding = model.patch_embed.proj
    for image, draws in zip(images, noise, strict=True):
        patches = [
            image[:, row * p : (row + 1) * p, column * p : (column + 1) * p]
            for row in range(side)
            for column in range(side)
        ]
        kept = sorted(range(9), key=lambda place: draws[place].item())[:2]
        encoded = [model.cls_token[0, 0]]
        for place in kept:
            token = (embedding.weight * patches[place]).sum(dim=(1, 2, 3)) + embedding.bias
            encoded.append(token + slow_positions(3, 16)[place])
        x = mae.embed(model.norm(model.blocks(torch.stack(encoded)[None])))[0]
        tokens = [x[0]]
        for place in range(9):
            token = x[1 + kept.index(place)] if place in kept else mae.mask_token[0, 0]
            tokens.append(token + slow_positions(3, 8)[place])
        predicted = mae.predict(mae.norm(mae.blocks(torch.stack(tokens)[None])))[0]
        for place in set(range(9)) - set(kept):
            target = torch.stack(
                [patches[place][c, i, j] for i in range(p) for j in range(p) for c in range(3)]
            )
            if normalized:
                variance = (target - target.mean()).square().sum() / (len(target) - 1)
                target = (target - target.mean()) / (variance + 1e-6).sqrt()
            losses.append((predicted[1 + place] - target).square().mean())
    return torch.stack(losses).mean()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("normalized", [True, False])
def test_loss_and_gradients_equal_the_slow_version(normalized: bool, recompute: bool) -> None:
    model = small_model()
    random = torch.Generator().manual_seed(2)
    images = torch.randn(3, 3, 12, 12, generator=random, dtype=torch.float64)
    noise = torch.rand(3, 9, generator=random, dtype=torch.float64)
    if recompute:
        checkpoint_activations(model)
    order = torch.from_numpy(random_orders(noise.numpy()))
    places = order.argsort(dim=1)
    predicted = model(images, output="objective", kept_BK=order[:, :2], places_BL=places)
    loss = reconstruction_loss(
        predicted,
        to_patches(images, patch_size=4),
        removed_BR=order[:, 2:],
        normalized=normalized,
    )
    loss.backward()
    found = [parameter.grad for parameter in model.parameters()]
    expected = slow_loss(model, images, noise, normalized=normalized)
    # The targets are fp32.
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    slow = torch.autograd.grad(expected, list(model.parameters()))
    torch.testing.assert_close(found, list(slow), rtol=1e-4, atol=1e-6)


def test_positions_are_added_before_patches_are_removed() -> None:
    """All patches kept in another order: the features of a plain forward pass, in that order."""
    for changes in ({}, {"positions": "learned"}):
        model = small_model(SMALL.model_copy(update=changes))
        images = torch.randn(2, 3, 12, 12, dtype=torch.float64)
        order = torch.stack([torch.randperm(9), torch.randperm(9)])
        encoded = encode_kept(model, images, kept_BK=order)
        plain = model.forward_features(images)
        torch.testing.assert_close(encoded[:, 0], plain[:, 0])
        expected = torch.stack([plain[i, 1 + order[i]] for i in range(2)])
        torch.testing.assert_close(encoded[:, 1:], expected)


def test_pictures_show_true_pixels_where_they_are_seen() -> None:
    images = torch.randint(0, 256, (2, 3, 8, 8), generator=torch.Generator().manual_seed(0))
    mean, std = (0.5, 0.25, 0.75), (0.5, 1.0, 0.25)
    pixels = images / 255 - torch.tensor(mean).view(3, 1, 1)
    patches = to_patches(pixels / torch.tensor(std).view(3, 1, 1), patch_size=4)
    options: Any = {"removed_BR": torch.tensor([[0, 3], [1, 2]]), "mean": mean, "std": std}
    zero = torch.zeros_like(patches)
    rows = picture_rows(zero, patches, normalized=True, grid=(2, 2), **options)
    assert torch.equal(rows["image"], images)
    seen = rows["visible +\npredicted"] == images
    assert seen[0, :, :4, 4:].all() and seen[0, :, 4:, :4].all() and not seen[0].all()
    perfect = picture_rows(patches, patches, normalized=False, grid=(2, 2), **options)
    assert torch.equal(perfect["visible +\npredicted"], images)
    assert torch.equal(perfect["predicted"][0, :, :4, :4], images[0, :, :4, :4].byte())


def test_ties_keep_their_order() -> None:
    assert random_orders(np.array([[0.3, 0.1, 0.9, 0.1]])).tolist() == [[1, 3, 0, 2]]


def test_start_is_that_of_mae() -> None:
    settings = SMALL.model_copy(update={"width": 64, "mlp_width": 256})
    arch = settings.resolved(num_classes=0)
    model: Any = build_model(arch, seed=0)
    torch.manual_seed(0)
    model.objective = MaskedAutoencoder(arch, width=64, depth=1, num_heads=2)
    patch = model.patch_embed.proj.weight
    fused = math.sqrt(6 / (64 + 3 * 64))
    for kernel, bound in (
        (patch, math.sqrt(6 / (64 + 48))),
        (model.blocks[0].attn.qkv.weight, fused),
        (model.objective.blocks[0].attn.qkv.weight, fused),
        (model.objective.predict.weight, math.sqrt(6 / (64 + 48))),
    ):
        assert 0.97 * bound < kernel.abs().max().item() <= bound
    for token in (model.cls_token, model.objective.mask_token):
        assert token.std().item() == pytest.approx(0.02, rel=0.3)
        assert not decayed("objective.mask_token", token)
    assert not any(model.objective.blocks[0].mlp.fc1.bias)
