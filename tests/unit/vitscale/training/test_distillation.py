"""Distillation losses against hand-computed numbers and slow formulas."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vitscale.data.loader import Batch
from vitscale.training.distillation import Distillation, DistillationSettings
from vitscale.training.losses import hard_loss, soft_loss, softmax_loss

CLS = torch.tensor([[1.0, 0.0, -1.0]])
DIST = torch.tensor([[0.0, 2.0, 0.0]])
TEACHER = torch.tensor([[3.0, 1.0, 0.0]])
LABEL = torch.tensor([1])


def test_hand_computed_case() -> None:
    """One image of class 1: cross-entropy, hard and soft parts, and their weighted sums."""
    labelled = softmax_loss(CLS, LABEL, 0.0).item()
    hard = hard_loss(DIST, TEACHER).item()
    soft = [soft_loss(DIST, TEACHER, tau=tau).item() / 3 for tau in (1.0, 3.0)]
    assert labelled == pytest.approx(1.407606, abs=1e-6)
    assert hard == pytest.approx(2.239545, abs=1e-6)
    assert soft == pytest.approx([0.495629, 0.545280], abs=1e-6)
    assert 0.5 * labelled + 0.5 * hard == pytest.approx(1.823575, abs=1e-6)
    totals = [0.9 * labelled + 0.1 * each for each in soft]
    assert totals == pytest.approx([1.316408, 1.321373], abs=1e-6)


def test_soft_loss_equals_the_sum_written_out() -> None:
    student, teacher = (
        torch.randn(4, 5, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)
    )
    tau, total = 2.5, 0.0
    for s, t in zip(student.double().numpy(), teacher.double().numpy(), strict=True):
        q, p = (np.exp(x / tau) / np.exp(x / tau).sum() for x in (s, t))
        total += sum(p[c] * math.log(p[c] / q[c]) for c in range(5))
    slow = tau**2 * total / 4
    assert soft_loss(student, teacher, tau=tau).item() == pytest.approx(slow)
    assert soft_loss(teacher, teacher, tau=tau).item() == pytest.approx(0)


class FakeTeacher:
    """Gives the hand-computed logits."""

    def logits(self, images: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
        return TEACHER.expand(len(images), 3)


class FakeEngine:
    dtype = torch.float32

    def heads(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return CLS.expand(len(images), 3), DIST.expand(len(images), 3)

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        return DIST.expand(len(images), 3)


def objective(**settings: Any) -> Any:
    settings = {"teacher": {"weights": "runs/teacher"}, **settings}
    made: Any = Distillation(DistillationSettings.model_validate(settings), seed=0)
    made.teacher, made.has_token = FakeTeacher(), True
    return made


def test_each_head_learns_from_its_own_target() -> None:
    batch = Batch(torch.zeros(2, 3, 4, 4), torch.tensor([1, 1]), torch.ones(2))
    assert objective().loss(FakeEngine(), batch).item() == pytest.approx(1.823575, abs=1e-6)
    soft = objective(kind="soft", alpha=0.1, tau=3.0)
    expected = 0.9 * 1.407606 + 0.1 * 3 * 0.545280
    assert soft.loss(FakeEngine(), batch).item() == pytest.approx(expected, abs=1e-6)
    one_head = objective()
    one_head.has_token = False
    expected = 0.5 * softmax_loss(DIST, LABEL, 0.0) + 0.5 * hard_loss(DIST, TEACHER)
    assert one_head.loss(FakeEngine(), batch).item() == pytest.approx(expected.item())


def test_labels_are_mixed_and_smoothed_but_the_teacher_is_not() -> None:
    batch = Batch(
        torch.zeros(2, 3, 4, 4), torch.tensor([1, 2]), torch.ones(2),
        mixed_labels=torch.tensor([2, 1]), mix_lambda=torch.tensor([0.7, 0.7]),
    )  # fmt: skip
    labelled = softmax_loss(
        CLS.expand(2, 3), batch.labels, 0.1, mixed_labels_B=batch.mixed_labels,
        mix_lambda_B=batch.mix_lambda,
    )  # fmt: skip
    expected = 0.5 * labelled.item() + 0.5 * 2.239545
    found = objective(label_smoothing=0.1).loss(FakeEngine(), batch)
    assert found.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"tau": 3.0}, "objective.tau"),
        ({"loss": "bce", "label_smoothing": 0.1}, "objective.label_smoothing"),
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, Any], key: str) -> None:
    values = {"teacher": {"weights": "x"}, **settings}
    assert dict(DistillationSettings.model_validate(values).problems()).keys() == {key}


def test_agreement_is_that_of_the_distilled_head() -> None:
    """The class head agrees on every image, the distilled one on the first of three."""
    teacher_BC = TEACHER.expand(3, 3)
    distilled_BC = torch.stack([TEACHER, -TEACHER, -TEACHER]).reshape(3, 3)
    engine: Any = SimpleNamespace(dtype=torch.float32, heads=lambda _: (teacher_BC, distilled_BC))
    batch = Batch(torch.zeros(3, 3, 4, 4), torch.tensor([0, 1, 2]), torch.ones(3))
    own, recorded = objective(), {}
    own.record = lambda name, value: recorded.update({name: value.item()})
    own.loss(engine, batch)
    assert recorded["train/teacher_agreement"] == pytest.approx(1 / 3)
