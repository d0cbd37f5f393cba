"""Accuracy and loss equal loops over single images; padding is not counted."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.engine.given_outputs import given_outputs
from vitscale.distributed.world import World
from vitscale.evaluation.interface.evaluation import Share
from vitscale.evaluation.logits.classification import Classification, ClassificationSettings

NUM = 10


@pytest.mark.parametrize("num_classes", [5, 8])
def test_metrics_equal_brute_force(world: World, num_classes: int) -> None:
    logits = torch.randn(NUM, num_classes, generator=torch.Generator().manual_seed(1))
    labels = [(3 * number) % num_classes for number in range(NUM)]
    found = Classification(ClassificationSettings()).metrics(given_outputs(world, logits, labels))
    at1 = at5 = loss = 0.0
    for row, label in zip(logits.tolist(), labels, strict=True):
        better = sum(value > row[label] for value in row)
        at1, at5 = at1 + (better < 1), at5 + (better < 5)
        loss += math.log(sum(map(math.exp, row))) - row[label]
    expected = {"top1": at1 / NUM, "loss": loss / NUM}
    if num_classes > 5:
        expected["top5"] = at5 / NUM
    assert found == pytest.approx(expected, rel=1e-6)
    assert isinstance(found["top1"], Share) and found["top1"].images == NUM
