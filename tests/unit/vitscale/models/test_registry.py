"""The table of model families."""

from __future__ import annotations

import pytest
import torch

from vitscale.models.interface import InFp32
from vitscale.models.registry import MODELS
from vitscale.models.settings import Architecture, TimmSettings, ViTSettings

SMALL = {"image_size": 32, "patch_size": 8, "width": 24, "depth": 1, "num_heads": 2}
SMALL["mlp_width"] = 48
SMALL_MODELS: dict[str, Architecture] = {
    "vit": ViTSettings(**SMALL, distillation_token=True),
    "timm": TimmSettings(image_size=32, model="test_convnext"),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_objective_takes_further_inputs(name: str) -> None:
    settings = SMALL_MODELS[name]
    model = MODELS[name].load().build_model(settings.resolved(num_classes=5), seed=0)
    images = torch.zeros(1, 3, 32, 32)
    with pytest.raises(AssertionError, match="feature"):
        model(images, output="feature")
    model.objective = Scaled()
    assert torch.equal(model(images + 1, output="objective", factor=2), images + 2)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_in_fp32_in_a_model_in_bf16(name: str) -> None:
    """Near -10, where bf16 has steps of 0.06; also under autocast, as at ZeRO stage 0."""
    settings = SMALL_MODELS[name]
    model = MODELS[name].load().build_model(settings.resolved(num_classes=5), seed=0)
    heads = [module for module in model.modules() if isinstance(module, InFp32)]
    assert len(heads) == (2 if name == "vit" else 1)
    originals: dict[str, torch.Tensor] = {}
    for head in heads:
        torch.nn.init.normal_(head.weight, std=0.1)
        torch.nn.init.normal_(head.bias, mean=-10)
        originals |= {n: p.detach().clone() for n, p in head.named_parameters()}
    images = torch.zeros(1, 3, 32, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(images).dtype == torch.float32
    rounded = model.bfloat16()(images.bfloat16())
    assert rounded.dtype == torch.float32
    last = heads[-1]
    last.remainders = {n: (originals[n] - p).detach() for n, p in last.named_parameters()}
    features = torch.randn(4, *last.weight.shape[1:]).bfloat16()
    wanted = features.float().flatten(1) @ originals["weight"].flatten(1).T + originals["bias"]
    assert (last(features).flatten(1) - wanted).abs().max() < 1e-5
    last.remainders = {}
    assert (last(features).flatten(1) - wanted).abs().max() > 1e-3


class Scaled(torch.nn.Module):
    def forward(self, model: torch.nn.Module, images: torch.Tensor, factor: int) -> torch.Tensor:
        return images * factor
