"""Masked patches: corruption by a statistical test, targets and losses against slow references."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from pretrain.objectives.masked_patch_prediction import MaskedPatchPredictionSettings
from pretrain.objectives.masked_patches import (
    MaskedPatches,
    color_loss,
    colors,
    draw_corruption,
)
from vitscale.models.patches import on_device, to_images, to_patches
from vitscale.models.settings import ViTSettings
from vitscale.models.vit import build_model

NUM_PATCHES, NUM_CORRUPTED, NUM_IMAGES = 196, 98, 1100
Corruption = dict[str, np.ndarray]
SIZES: dict[str, Any] = {"image_size": 24, "patch_size": 8, "width": 24, "depth": 2}
SIZES |= {"num_heads": 2, "mlp_width": 40}


def drawn(positions: np.ndarray, *, key: int = 5, **changes: Any) -> Corruption:
    num_patches = changes.pop("num_patches", NUM_PATCHES)
    settings = MaskedPatchPredictionSettings(**changes)
    return draw_corruption(positions, settings=settings, num_patches=num_patches, key=key)


@pytest.fixture(scope="module")
def many() -> Corruption:
    return drawn(np.arange(NUM_IMAGES))


def test_exactly_half_of_each_image_is_corrupted(many: Corruption) -> None:
    assert many["predicted_BK"].shape == (NUM_IMAGES, NUM_CORRUPTED)
    assert (np.diff(many["predicted_BK"], axis=1) > 0).all()
    corrupted = np.zeros((NUM_IMAGES, NUM_PATCHES), dtype=bool)
    np.put_along_axis(corrupted, many["predicted_BK"], True, axis=1)
    own = many["sources_BN"] == np.arange(NUM_PATCHES)
    assert not (many["masked_BN"] & ~corrupted).any() and not (~own & ~corrupted).any()
    # Each patch is as often corrupted as any other: 5 sigma of a binomial.
    often = corrupted.mean(axis=0)
    assert np.abs(often - 0.5).max() < 5 * math.sqrt(0.25 / NUM_IMAGES)


def test_corrupted_patches_are_masked_swapped_or_kept(many: Corruption) -> None:
    """5 sigma at 107,800 patches: 0.61 points for 80 %, 0.46 for 10 %."""
    total = NUM_IMAGES * NUM_CORRUPTED
    swapped = many["sources_BN"] != np.arange(NUM_PATCHES)
    assert not (swapped & many["masked_BN"]).any()
    for share, found in ((0.8, many["masked_BN"].sum()), (0.1, swapped.sum())):
        assert abs(found / total - share) < 5 * math.sqrt(share * (1 - share) / total)


def test_every_other_patch_is_equally_likely_to_replace_one(many: Corruption) -> None:
    images, patches = np.nonzero(many["sources_BN"] != np.arange(NUM_PATCHES))
    donors = many["sources_BN"][images, patches]
    distances = (donors - patches) % NUM_PATCHES
    counts = np.bincount(distances, minlength=NUM_PATCHES)[1:]
    expected = len(images) / (NUM_PATCHES - 1)
    chi_square = ((counts - expected) ** 2 / expected).sum()
    # Mean 194 and deviation sqrt(2 * 194) with 195 equally likely distances.
    assert abs(chi_square - 194) < 5 * math.sqrt(2 * 194)
    # No patch replaces two.
    assert len(set(zip(images.tolist(), donors.tolist(), strict=True))) == len(images)


def test_colors_equal_a_slow_reference() -> None:
    random = np.random.default_rng(0)
    patches = random.integers(0, 256, (2, 3, 8, 8, 3), dtype=np.uint8)
    # A channel's mean is exactly at the border of two levels, or at its ends.
    patches[0, 0] = [255, 0, 51]
    patches[0, 1, :, :, 0] = 255 * (np.arange(64).reshape(8, 8) % 8 < 3)
    found = colors(torch.from_numpy(patches).flatten(2))
    for b, k in np.ndindex(2, 3):
        means = patches[b, k].reshape(-1, 3).astype(np.float64).mean(axis=0) / 255
        r, g, blue = np.minimum(np.floor(8 * means), 7).astype(int)
        assert found[b, k] == 64 * r + 8 * g + blue


def test_patches_are_rows_with_channels_last_and_chance_loses_ln_512() -> None:
    images = torch.randint(0, 256, (2, 3, 12, 12), dtype=torch.uint8)
    patches = to_patches(images, patch_size=4)
    pixels = patches.unflatten(2, (4, 4, 3))
    for number in range(9):
        top, left = 4 * (number // 3), 4 * (number % 3)
        expected = images[:, :, top : top + 4, left : left + 4].permute(0, 2, 3, 1)
        assert torch.equal(pixels[:, number], expected)
    assert torch.equal(to_images(patches, grid=(3, 3)), images)
    loss, accuracy = color_loss(torch.zeros(2, 3, 512), torch.tensor([[0, 1, 2], [3, 4, 5]]))
    assert (loss.item(), accuracy.item()) == pytest.approx((math.log(512), 1 / 6))


@pytest.mark.parametrize(
    "options",
    [{}, {"pool": "gap", "positions": "sincos2d"}, {"num_registers": 2}],
)
def test_predictions_equal_an_independent_forward_pass(options: dict[str, Any]) -> None:
    """Corrupted image by image, before positions; read from each patch's own token."""
    torch.manual_seed(0)
    options = SIZES | options
    settings = ViTSettings(**options)
    arch = settings.resolved(num_classes=0)
    model = build_model(arch, seed=0).eval()
    model.objective = MaskedPatches(arch.width)
    torch.nn.init.normal_(model.objective.head.weight)
    if model.cls_token is not None:
        torch.nn.init.normal_(model.cls_token)
    corruption = drawn(
        np.arange(3), num_patches=9, corrupted_share=0.667, mask_share=0.4, swap_share=0.4
    )
    images = torch.randn(3, 3, arch.image_size, arch.image_size)
    inputs = {n: on_device(v, torch.device("cpu")) for n, v in corruption.items()}
    found = model(images, output="objective", **inputs)
    assert found.shape == (3, 6, 512)
    prefix = arch.num_prefix_tokens
    for b in range(3):
        clean = model.patch_embed(images[b : b + 1])[0]
        rows = []
        for patch in range(9):
            if corruption["masked_BN"][b, patch]:
                rows.append(model.objective.mask_token[0, 0])
            else:
                rows.append(clean[corruption["sources_BN"][b, patch]])
        tokens = model.norm(model.blocks(model._pos_embed(torch.stack(rows)[None])))[0, prefix:]
        for k, patch in enumerate(corruption["predicted_BK"][b]):
            expected = tokens[patch] @ model.objective.head.weight.T
            assert torch.allclose(found[b, k], expected, atol=1e-5)
