"""Blocks that are compiled one by one share their code, whatever their rates of drop path."""

from __future__ import annotations

import torch

from vitscale.models.interface import SharedDropPath
from vitscale.models.settings import ViTSettings
from vitscale.models.vit import build_model, compile_blocks

SMALL = ViTSettings(
    image_size=8, patch_size=4, width=16, depth=4, num_heads=2, mlp_width=32, drop_path=0.3
)


def test_blocks_of_different_rates_are_compiled_once() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = build_model(SMALL.resolved(num_classes=3), seed=0)
    names = set(model.state_dict())
    compile_blocks(model, backend="aot_eager")
    assert set(model.state_dict()) == names
    rates = {m.rate.item() for m in model.modules() if isinstance(m, SharedDropPath)}
    assert len(rates) == SMALL.depth - 1  # the first block has none
    model(torch.rand(4, 3, 8, 8)).sum().backward()
    # Without drop path in the first block, with it in the others.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_samples_are_dropped_at_the_rate() -> None:
    ones = torch.ones(20_000, 1, 1)
    drop = SharedDropPath(0.3)
    found = drop(ones)
    assert set(found.unique().tolist()) == {0.0, torch.tensor(1 / 0.7).item()}
    assert abs((found == 0).float().mean().item() - 0.3) < 0.02
    assert torch.equal(drop.eval()(ones), ones)
