"""Accuracy and loss equal loops over single images; padding is not counted."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from tests.support.engine.given_outputs import given_outputs
from vitscale.distributed.world import World
from vitscale.evaluation.interface.evaluation import Outputs, Share
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


def test_each_head_of_a_distilled_model_is_counted(world: World) -> None:
    """The class head is right about image 0, the other about 0 and 1, their sum about 0 and 2."""
    heads_2BC = torch.tensor(
        [
            [[2.0, 0, 0], [9, 0, 0], [0, 3.0, 2.9], [1, 0, 0]],
            [[2.0, 0, 0], [0, 1, 0], [1.0, 0.0, 0.9], [1, 0, 0]],
        ]
    )
    model = SimpleNamespace(world=world, known_outputs=("logits", "heads"))
    val = SimpleNamespace(classes=("a", "b", "c"))
    evaluation = Classification(ClassificationSettings())
    evaluation.start(SimpleNamespace(model=model, val=val))  # type: ignore[arg-type]  # what is read
    labels_B, weights_B = torch.tensor([0, 1, 2, 0]), torch.tensor([1.0, 1, 1, 0])  # one is padding
    mean_BC = heads_2BC.mean(dim=0)
    evaluation.add(Outputs(mean_BC, labels_B, weights_B, None, heads_2BC))  # type: ignore[arg-type]  # no numbers
    found = evaluation.finish()
    shares = {"cls_top1": 1 / 3, "dist_top1": 2 / 3, "softmax_top1": 2 / 3}
    assert {name: found[name] for name in shares} == pytest.approx(shares)
