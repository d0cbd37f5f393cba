"""Losses of logits in low precision, and of mixed labels."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from vitscale.training.losses import LOSSES

MIXED = [False, True]


@pytest.mark.parametrize("mixed", MIXED)
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_bf16_logits_give_the_fp32_loss(loss: Callable[..., torch.Tensor], mixed: bool) -> None:
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 100, generator=random).bfloat16()
    labels = torch.arange(8)
    options = {"mixed_labels_B": labels + 1, "mix_lambda_B": torch.full((8,), 0.3)} if mixed else {}
    found = loss(logits, labels, 0.0, **options)
    assert found.dtype == torch.float32
    assert torch.equal(found, loss(logits.float(), labels, 0.0, **options))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_lambda_of_one_is_the_loss_without_mixing(smoothing: float) -> None:
    logits, labels = torch.randn(4, 5), torch.tensor([0, 1, 2, 3])
    mixed = LOSSES["softmax"](
        logits, labels, smoothing, mixed_labels_B=labels + 1, mix_lambda_B=torch.ones(4)
    )
    torch.testing.assert_close(mixed, LOSSES["softmax"](logits, labels, smoothing))


@pytest.mark.parametrize("mixed", MIXED)
def test_sigmoid_smoothing_equals_the_slow_formula(mixed: bool) -> None:
    """Targets of an image sum to 1; binary cross-entropy in fp64, class by class."""
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)) - 6.9
    labels, others = torch.tensor([0, 1, 2, 3, 1]), torch.tensor([1, 1, 0, 2, 6])
    shares = torch.tensor([0.7, 0.6, 1.0, 0.0, 0.5]) if mixed else torch.ones(5)
    total = 0.0
    for row in range(5):
        targets = [1e-4 / 7] * 7
        targets[labels[row]] += (1 - 1e-4) * shares[row].item()
        targets[others[row]] += (1 - 1e-4) * (1 - shares[row].item())
        assert sum(targets) == pytest.approx(1)
        for logit, target in zip(logits[row].tolist(), targets, strict=True):
            p = 1 / (1 + math.exp(-logit))
            total -= target * math.log(p) + (1 - target) * math.log(1 - p)
    options = {"mixed_labels_B": others, "mix_lambda_B": shares} if mixed else {}
    found = LOSSES["sigmoid"](logits, labels, 1e-4, **options)
    assert found.item() == pytest.approx(total / 5, rel=1e-6)


def test_bce_counts_every_mixed_label_as_one() -> None:
    """DeiT-III: targets above 0 become 1; a mean over batch and classes."""
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    labels, others = torch.tensor([0, 1, 2, 3, 1]), torch.tensor([1, 1, 0, 2, 2])
    shares = torch.tensor([0.7, 0.6, 1.0, 0.0, 0.5])
    one_hot = torch.nn.functional.one_hot
    soft = shares[:, None] * one_hot(labels, 4) + (1 - shares[:, None]) * one_hot(others, 4)
    slow = torch.nn.functional.binary_cross_entropy_with_logits(logits, soft.gt(0).float())
    found = LOSSES["bce"](logits, labels, 0.0, mixed_labels_B=others, mix_lambda_B=shares)
    torch.testing.assert_close(found, slow)
    plain = torch.nn.functional.binary_cross_entropy_with_logits(logits, one_hot(labels, 4).float())
    torch.testing.assert_close(LOSSES["bce"](logits, labels, 0.0), plain)
