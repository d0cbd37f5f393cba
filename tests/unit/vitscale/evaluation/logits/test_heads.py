"""Accuracy of each head of a model with a distillation token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vitscale.config.errors import UserError
from vitscale.distributed.world import World
from vitscale.evaluation.interface.evaluation import Outputs
from vitscale.evaluation.logits.heads import Heads, HeadsSettings


def test_a_model_with_one_head_is_refused_before_the_evaluation() -> None:
    model = SimpleNamespace(known_outputs=("logits", "features"))
    subject: Any = SimpleNamespace(model=model)
    with pytest.raises(UserError, match="'heads', which this model does not have(?s:.*)logits"):
        Heads(HeadsSettings()).check(subject)


def test_metrics_equal_a_case_by_hand(world: World) -> None:
    """The class head is right about image 0, the other about 0 and 1, their sum about 0 and 2."""
    heads_2BC = torch.tensor(
        [
            [[2.0, 0, 0], [9, 0, 0], [0, 3.0, 2.9], [1, 0, 0]],
            [[2.0, 0, 0], [0, 1, 0], [1.0, 0.0, 0.9], [1, 0, 0]],
        ]
    )
    evaluation = Heads(HeadsSettings())
    evaluation.start(SimpleNamespace(model=SimpleNamespace(world=world)))  # type: ignore[arg-type]  # what is read of it
    weights = torch.tensor([1.0, 1, 1, 0])  # the last one is padding
    evaluation.add(Outputs(heads_2BC, torch.tensor([0, 1, 2, 0]), weights, None))  # type: ignore[arg-type]  # no numbers
    shares = {"cls_top1": 1 / 3, "dist_top1": 2 / 3, "softmax_top1": 2 / 3}
    assert evaluation.finish() == pytest.approx(shares)
