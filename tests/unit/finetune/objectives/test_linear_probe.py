"""A linear probe trains the head alone, and refuses what would change the features."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from finetune.run import FinetuneRun
from vitscale.models.vit.model import build_model

RUN: dict[str, Any] = {
    "name": "x",
    "data": {"path": "s", "global_batch": 8},
    "model": {"width": 16, "depth": 2, "num_heads": 2, "mlp_width": 24, "patch_size": 4}
    | {"image_size": 8, "head_std": 0.01},
    "objective": {"name": "linear_probe"},
    "optim": {"name": "lars", "lr": 0.1},
    "schedule": {"steps": 10},
    "engine": {"zero_stage": 0},
}


def test_only_the_head_is_trained_on_standardised_features() -> None:
    run: Any = FinetuneRun.model_validate(RUN)
    assert not list(run.problems())
    arch = run.model.architecture(num_classes=3)
    plain, model = (build_model(run.model, arch, seed=0) for _ in range(2))
    objective = run.make_objective()
    objective.extend_model(model, arch)
    assert [name for name, _ in model.named_parameters()] == ["head.1.weight", "head.1.bias"]
    assert sum(p.numel() for p in model.parameters()) == objective.num_parameters(arch) == 51
    trunk = {n: v for n, v in plain.state_dict().items() if not n.startswith("head.")}
    state = model.state_dict()
    assert set(state) == {*trunk, "head.0.mean", "head.0.variance", "head.1.weight", "head.1.bias"}
    assert all(torch.equal(state[name], value) for name, value in trunk.items())
    images = torch.randn(4, 3, 8, 8)
    mean, variance = torch.randn(16), torch.rand(16)
    model.head[0].mean.copy_(mean)
    model.head[0].variance.copy_(variance)
    features = plain(images, output="features")
    assert torch.equal(model(images, output="features"), features)
    logits = model(images)
    standard = (features - mean) / (variance + 1e-6).sqrt()
    torch.testing.assert_close(logits, standard @ plain.head.weight.T + plain.head.bias)
    logits.square().sum().backward()
    assert model.head[1].weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    "section, changes, keys",
    [
        ("model", {"drop_path": 0.1}, ["model.drop_path"]),
        ("model", {"dropout": 0.1}, ["model.dropout"]),
        ("model", {"representation_layer": True}, ["model.representation_layer"]),
        ("optim", {"ema": {}}, ["optim.ema"]),
        ("engine", {"zero_stage": 1}, ["engine.zero_stage"] * 2),
    ],
)
def test_what_a_probe_does_not_have_is_refused(
    section: str, changes: dict[str, Any], keys: list[str]
) -> None:
    run = FinetuneRun.model_validate(RUN | {section: RUN[section] | changes})
    assert [key for key, _ in run.problems()] == keys


def test_a_probe_costs_the_forward_pass_of_its_trunk() -> None:
    run: Any = FinetuneRun.model_validate(RUN)
    arch, objective = run.model.architecture(num_classes=3), run.make_objective()
    supervised: Any = FinetuneRun.model_validate(RUN | {"objective": {}})
    full = supervised.make_objective().train_flops_per_image(arch)
    assert objective.train_flops_per_image(arch) == (full - 6 * 16 * 3) // 3 + 6 * 16 * 3
    options = {"precision": "fp32", "activation_checkpointing": False}
    kept = supervised.make_objective().activation_bytes_per_image(arch, **options)
    assert objective.activation_bytes_per_image(arch, **options) == kept // 2
