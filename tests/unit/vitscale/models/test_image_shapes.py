"""Models on images that are not square: grids, costs, outputs, descriptions."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from vitscale.models.costs import num_parameters, train_flops_per_image
from vitscale.models.registry import MODELS

VIT = {"patch_size": 8, "width": 48, "depth": 2, "num_heads": 3, "mlp_width": 96}
FAMILIES: dict[str, dict[str, Any]] = {
    "vit": {**VIT, "image_size": [32, 64]},
}


def built(name: str) -> tuple[Any, Any, torch.nn.Module]:
    family = MODELS[name]
    settings = family.Settings.model_validate({"name": name, **FAMILIES[name]})
    assert not list(settings.problems())
    arch = settings.architecture(num_classes=5)
    return settings, arch, family.load().build_model(settings, arch, seed=0).eval()


@pytest.mark.parametrize("name", FAMILIES)
def test_costs_equal_what_a_wide_model_computes(name: str) -> None:
    _, arch, model = built(name)
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False  # the counter does not know the fused kernel of the CPU
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        assert model(torch.zeros(1, 3, *arch.image_shape)).shape == (1, 5)
    assert counter.get_total_flops() * 3 == train_flops_per_image(arch)
    assert sum(each.numel() for each in model.parameters()) == num_parameters(arch)


def test_the_grid_has_the_shape_of_the_image() -> None:
    assert built("vit")[1].grid == (4, 8)


def test_a_square_is_described_by_one_number() -> None:
    """So that checkpoints written before still describe the same architecture."""
    for given, described in ((32, 32), ([32, 32], 32), ([32, 64], [32, 64])):
        settings = MODELS["vit"].Settings.model_validate(
            {"name": "vit", **VIT, "image_size": given}
        )
        description = settings.architecture(num_classes=5).description()
        assert json.loads(json.dumps(description))["image_size"] == described
        assert description["image_size"] == described


def test_patches_are_numbered_row_by_row() -> None:
    _, arch, model = built("vit")
    images = torch.zeros(1, 3, 32, 64)
    images[..., 8:16, 56:] = 1.0  # the patch in row 1, column 7
    embedded = (model.patch_embed(images) - model.patch_embed(torch.zeros_like(images)))[0]
    assert embedded.reshape(*arch.grid, -1).abs().sum(-1).nonzero().tolist() == [[1, 7]]
