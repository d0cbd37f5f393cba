"""timm's functions build what our settings describe, and converted weights give our logits."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import timm
import torch
from timm.layers import StdConv2d
from timm.models.resnetv2 import ResNetV2

from tests.support.engine.small_models import small_model
from vitscale.models.registry import MODELS
from vitscale.models.weights.timm_architectures import (
    BITS,
    HYBRIDS,
    TIMM_EPS,
    timm_architecture,
    timm_weights,
)

HYBRID = {"patch_size": 1, "width": 24, "depth": 1, "num_heads": 3, "mlp_width": 40}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        *(("hybrid", {"stage_depths": depths, **HYBRID}) for depths in HYBRIDS),
        *(("bit_resnet", {"stage_depths": d, "root_width": width}) for d, width in BITS),
    ],
)
def test_timm_builds_tensors_of_the_same_shapes(family: str, settings: dict[str, Any]) -> None:
    chosen: Any = MODELS[family].Settings(image_size=64, **settings)
    arch = chosen.architecture(num_classes=5)
    built = timm_architecture(chosen, arch)
    with torch.device("meta"):
        theirs: Any = timm.create_model(built.name, num_classes=5, **built.arguments)
        ours = MODELS[family].load().build_model(chosen, arch, seed=0)
    shapes = [{n: v.shape for n, v in m.state_dict().items()} for m in (ours, theirs)]
    assert shapes[0] == shapes[1]
    theirs.get_submodule(built.first_conv)


@pytest.mark.parametrize("factor", [1.0, 1e-4])
def test_kernels_are_scaled_for_timms_epsilon(factor: float) -> None:
    loaded = small_model("bit_resnet")
    model: Any = ResNetV2(
        layers=[1, 1],
        width_factor=0.5,  # type: ignore[arg-type]  # timm multiplies
        num_classes=5,
        stem_type="fixed",
        conv_layer=partial(StdConv2d, eps=TIMM_EPS),
    ).eval()
    with torch.no_grad():
        for name, value in loaded.network.named_parameters():
            if value.ndim == 4 and not name.startswith("head"):
                value *= factor
        model.load_state_dict(timm_weights(loaded.network.state_dict(), loaded.arch))
        images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(model(images), loaded.network(images), rtol=1e-4, atol=1e-4)
