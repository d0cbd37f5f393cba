"""MAE as an objective: draws by position, any micro-batches, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pretrain.objectives.mae import Mae, MaeSettings
from pretrain.run import PretrainRun
from vitscale.data.loader import Batch
from vitscale.models.vit import build_model
from vitscale.training.objective import check_objective

MODEL = {"width": 16, "depth": 1, "num_heads": 2, "mlp_width": 16, "patch_size": 4}
MODEL |= {"image_size": 16, "positions": "sincos2d_mae"}
OBJECTIVE = {"name": "mae", "decoder_width": 8, "decoder_depth": 1, "decoder_heads": 2}
RUN: dict[str, Any] = {
    "name": "x",
    "data": {"path": "s", "global_batch": 8},
    "model": MODEL,
    "objective": OBJECTIVE,
    "optim": {"lr": 1e-3},
    "schedule": {"steps": 10},
}


class PlainEngine:
    """The forward pass of an engine, without DeepSpeed."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def normalized(self, images: torch.Tensor) -> torch.Tensor:
        return (images.float() / 255 - 0.5) / 0.5

    def forward(self, images: torch.Tensor, output: str, **inputs: Any) -> Any:
        return self.model(self.normalized(images), output=output, **inputs)


def set_up(*, seed: int = 0) -> tuple[Any, Any]:
    run: Any = PretrainRun.model_validate(RUN | {"seed": seed})
    objective = run.make_objective()
    arch = run.model.resolved(num_classes=0)
    torch.manual_seed(0)
    model = build_model(arch, seed=0)
    objective.extend_model(model, arch)
    return objective, PlainEngine(model)


IMAGES = torch.randint(
    0, 256, (8, 3, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
)


def batch_of(chosen: slice, *, first: int = 0) -> Batch:
    positions = np.arange(first, first + 8)[chosen]
    rows = len(positions)
    return Batch(IMAGES[chosen], torch.zeros(rows).long(), torch.ones(rows), positions=positions)


def test_loss_and_gradients_ignore_the_micro_batch() -> None:
    objective, engine = set_up()
    whole = objective.loss(engine, batch_of(slice(0, 8)))
    whole.backward()
    gradients = [p.grad.clone() for p in engine.model.parameters()]
    engine.model.zero_grad()
    parts = [objective.loss(engine, batch_of(slice(i, i + 2))) / 4 for i in range(0, 8, 2)]
    torch.stack(parts).sum().backward()
    torch.testing.assert_close(torch.stack(parts).sum(), whole)
    for parameter, gradient in zip(engine.model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-7)


def removed(objective: Any, engine: Any, *, first: int) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = objective.reconstruct(
            engine, IMAGES, positions=np.arange(first, first + 8)
        )[2]
    return found


def test_masks_are_functions_of_seed_and_position() -> None:
    objective, engine = set_up()
    first = removed(objective, engine, first=0)
    assert first.shape == (8, 12)
    assert torch.equal(first[4:], removed(objective, engine, first=4)[:4])
    assert not torch.equal(first, removed(objective, engine, first=8))
    assert not torch.equal(first, removed(set_up(seed=1)[0], engine, first=0))
    assert len({tuple(sorted(row)) for row in first.tolist()}) == 8


def test_patches_are_removed_equally_often() -> None:
    """12 of 16 for each of 1,600 images: 5 sigma are 0.054."""
    objective, engine = set_up()
    counts = torch.zeros(16)
    for first in range(0, 1600, 8):
        counts += torch.bincount(removed(objective, engine, first=first).flatten(), minlength=16)
    assert (counts / 1600 - 0.75).abs().max() < 0.054


def test_labels_are_not_needed() -> None:
    check_objective(Mae(MaeSettings(), seed=0), num_classes=0, views=1, path="/s")


@pytest.mark.parametrize(
    "section, changes, key",
    [
        ("model", {"pool": "gap"}, "model.pool"),
        ("model", {"num_registers": 2}, "model.num_registers"),
        ("model", {"representation_layer": True}, "model.representation_layer"),
        ("model", {"pool": "gap", "class_token": True, "pool_norm": True}, "model.pool_norm"),
        ("model", {"num_classes": 3}, "model.num_classes"),
        ("data", {"mixing": {"mixup_alpha": 0.2}}, "data.mixing"),
        ("objective", {"mask_ratio": 0.95}, "objective.mask_ratio"),
        ("objective", {"mask_ratio": 1e-20}, "objective.mask_ratio"),
        ("objective", {"decoder_heads": 3}, "objective.decoder_heads"),
        ("objective", {"decoder_width": 6}, "objective.decoder_width"),
    ],
)
def test_what_does_not_fit_is_refused(section: str, changes: dict[str, Any], key: str) -> None:
    run = PretrainRun.model_validate(RUN | {section: RUN[section] | changes})
    assert [where for where, _ in run.problems()] == [key]


def test_classification_is_refused_and_pooling_allowed() -> None:
    run = PretrainRun.model_validate(RUN | {"evaluate": [{"name": "classification"}]})
    assert [where for where, _ in run.problems()] == ["evaluate"]
    model = MODEL | {"pool": "gap", "class_token": True}
    assert not list(PretrainRun.model_validate(RUN | {"model": model}).problems())
