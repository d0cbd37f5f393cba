"""Masked patch prediction as an objective: loss, gradients, costs and conflicts."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from pretrain.objectives.masked_patch_prediction import (
    COLOR_ACCURACY,
    MaskedPatchPrediction,
)
from pretrain.run import PretrainRun
from vitscale.data.loader import Batch
from vitscale.models.settings import ViTSettings
from vitscale.training.build import build_model
from vitscale.training.supervised import Supervised, SupervisedSettings

RUN: dict[str, Any] = {
    "name": "x",
    "data": {"path": "s", "global_batch": 8},
    "model": {"width": 24, "depth": 2, "num_heads": 2, "mlp_width": 40, "patch_size": 8}
    | {"image_size": 24},
    "optim": {"lr": 1e-3},
    "schedule": {"steps": 10},
    "objective": {"name": "masked_patch_prediction"},
}


def run_of(**changes: Any) -> PretrainRun:
    """RUN with changes, by section."""
    values = dict(RUN)
    for name, value in changes.items():
        values[name] = values[name] | value if isinstance(value, dict) else value
    return PretrainRun.model_validate(values)


class PlainEngine:
    """The model alone, with what `loss` uses of the engine."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def forward(self, images: torch.Tensor, output: str, **inputs: torch.Tensor) -> Any:
        return self.model((images.float() / 255 - 0.5) / 0.5, output=output, **inputs)


def opened(seed: int = 0) -> tuple[MaskedPatchPrediction, Any]:
    run = run_of(seed=seed)
    objective: Any = run.make_objective()
    model = build_model(run, objective, run.model.resolved(num_classes=0))
    return objective, PlainEngine(model)


def batch_of(positions: np.ndarray) -> Batch:
    """Images that are functions of their positions."""
    images = [
        torch.randint(0, 256, (3, 24, 24), generator=torch.Generator().manual_seed(int(p))).byte()
        for p in positions
    ]
    nothing = torch.zeros(len(positions))
    return Batch(torch.stack(images), nothing.long(), nothing, positions=positions)


def test_loss_and_gradients_are_equal_for_any_split_of_a_batch() -> None:
    """As over ranks or accumulated micro-batches: the mean over equal parts."""
    found = []
    for parts in (1, 2, 4):
        objective, engine = opened()
        # A zero head gives the trunk no gradients.
        generator = torch.Generator().manual_seed(0)
        torch.nn.init.normal_(engine.model.objective.head.weight, generator=generator)
        total = 0.0
        for positions in np.split(np.arange(16, 24), parts):
            loss = objective.loss(engine, batch_of(positions)) / parts
            loss.backward()
            total += loss.item()
        found.append((total, [p.grad for p in engine.model.parameters()]))
    for loss_of_parts, gradients in found[1:]:
        assert loss_of_parts == pytest.approx(found[0][0], rel=1e-5)
        for own, whole in zip(gradients, found[0][1], strict=True):
            assert torch.allclose(own, whole, rtol=1e-3, atol=1e-6)


def test_the_first_loss_is_that_of_chance() -> None:
    objective, engine = opened()
    assert objective.loss(engine, batch_of(np.arange(4))).item() == pytest.approx(6.2383, abs=5e-5)


def test_training_learns_to_predict_constant_images() -> None:
    objective, engine = opened()
    batch = batch_of(np.arange(4))
    batch.images[:] = torch.tensor([250, 100, 3], dtype=torch.uint8)[:, None, None]
    optimizer = torch.optim.Adam(engine.model.parameters(), lr=0.01)
    losses = []
    for _ in range(20):
        losses.append(objective.loss(engine, batch))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.1 * losses[0]


def test_costs_are_those_of_the_module() -> None:
    objective, engine = opened()
    arch = objective._arch
    head = engine.model.objective.head
    assert objective.num_parameters(arch) == sum(p.numel() for p in engine.model.parameters())
    supervised = Supervised(SupervisedSettings(), seed=0)
    more = objective.train_flops_per_image(arch) - supervised.train_flops_per_image(arch)
    # Half of 9 patches is 4: Python rounds to even.
    assert more == 6 * 4 * head.weight.numel()
    memory = [
        each.activation_bytes_per_image(arch, precision="bf16", activation_checkpointing=False)
        for each in (objective, supervised)
    ]
    outputs = len(head.bias)
    assert memory[0] - memory[1] == 4 * (2 * 24 + 2 * outputs + 8 * outputs)


def test_the_published_model_has_the_known_count() -> None:
    """B/16 at 224 px without its head, the mask embedding and 768 x 512 + 512."""
    arch = ViTSettings(preset="B/16", image_size=224).resolved(num_classes=0)
    count = run_of().make_objective().num_parameters(arch)
    assert count == 86_567_656 - 769_000 + 768 + 393_728


CONFLICTS: dict[str, tuple[dict[str, Any], str]] = {
    "mixing": ({"data": {"mixing": {"mixup_alpha": 0.2}}}, "data.mixing: .* set data.mixing=null"),
    "classes": ({"model": {"num_classes": 10}}, "model.num_classes: .* trains no classifier"),
    "tanh layer": ({"model": {"representation_layer": True}}, "model.representation_layer"),
    "logits": ({"evaluate": [{"name": "classification"}]}, "evaluate: classification needs a"),
    "shares": ({"objective": {"mask_share": 0.95}}, "mask_share: 0.95 and swap_share 0.1 exceed"),
    "none": ({"objective": {"corrupted_share": 0.05}}, "corrupted_share: 0.05 of 9 patches is non"),
    "one patch": (
        {"model": {"patch_size": 24}, "objective": {"corrupted_share": 1.0}},
        "objective.swap_share: an image of one patch has no other",
    ),
}


@pytest.mark.parametrize("case", CONFLICTS)
def test_conflicts_are_named_before_the_start(case: str) -> None:
    changes, pattern = CONFLICTS[case]
    (found,) = (": ".join(problem) for problem in run_of(**changes).problems())
    assert re.search(pattern, found), found


def test_a_wrong_model_is_one_problem_not_a_crash() -> None:
    run = run_of(model={"patch_size": 25})
    assert [key for key, _ in run.problems()] == ["model.image_size"]


def test_accuracy_is_recorded_for_the_log() -> None:
    objective, engine = opened()
    objective.loss(engine, batch_of(np.arange(4)))
    assert objective.metric_names == (COLOR_ACCURACY,) and objective._means is not None


def test_each_purpose_and_seed_has_its_own_draws() -> None:
    draws = {
        opened(seed)[0].corruption(np.arange(8), purpose=purpose).predicted_BK.tobytes()
        for purpose in ("corruption", "pictures")
        for seed in (0, 1)
    }
    assert len(draws) == 4
