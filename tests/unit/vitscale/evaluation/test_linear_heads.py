"""Linear heads: the best rate comes from a part of the training set."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.engine.subjects import WORLD, array_subject, split_of
from vitscale.config.errors import UserError
from vitscale.evaluation.features import Features
from vitscale.evaluation.linear_heads import (
    LinearHeads,
    LinearHeadsSettings,
    column_choices,
    dev_split,
    epoch_batches,
    train_heads,
)

RATES = (1e-6, 1.0)


def clusters(*, name: str, width: int = 5) -> Any:
    """Three classes that a line separates."""
    random = torch.Generator().manual_seed(len(name))
    labels = [number % 3 for number in range(90)]
    values = torch.randn(90, width, generator=random)
    values[torch.arange(90), torch.tensor(labels)] += 8.0
    return split_of(values, labels)


def probe(**settings: Any) -> LinearHeads:
    chosen = {"learning_rates": RATES, "steps": 60, "batch": 32, **settings}
    return LinearHeads(LinearHeadsSettings(**chosen))


def test_the_best_head_separates_clusters() -> None:
    subject = array_subject(clusters(name="train"), clusters(name="test"))
    found = probe().metrics(subject)
    ends = {"linear_top1": 1.0, "linear_dev_top1": 1.0, "linear_lr": 1.0, "linear_lr_at_end": 1.0}
    assert found == ends
    inside = probe(learning_rates=(1e-6, 1.0, 1e-7, 1e6)).metrics(subject)
    assert inside == ends | {"linear_lr_at_end": 0.0}


def test_the_reported_split_does_not_choose() -> None:
    """Its labels are shifted: the rate that learns nothing would look better on it."""
    train, test = clusters(name="train"), clusters(name="test")
    test.label = (test.label + 1) % 3
    found = probe().metrics(array_subject(train, test))
    assert (found["linear_top1"], found["linear_dev_top1"], found["linear_lr"]) == (0.0, 1.0, 1.0)


def test_the_part_that_chooses_is_not_trained_on() -> None:
    fit, dev = dev_split(50, 0.1, seed=0)
    assert len(dev) == 5 and sorted([*fit, *dev]) == list(range(50))
    assert not np.array_equal(dev, dev_split(50, 0.1, seed=1)[1])
    assert [len(each) for each in dev_split(2, 0.01, seed=0)] == [1, 1]


def test_heads_on_blocks_see_four_choices_of_columns() -> None:
    found = column_choices(10, "blocks")
    assert [each.tolist() for each in found] == [
        [0, 1],
        [0, 1, 2, 3, 4, 5, 6, 7],
        [0, 1, 8, 9],
        list(range(10)),
    ]
    subject = array_subject(clusters(name="train", width=10), clusters(name="test", width=10))
    assert probe(inputs="blocks").metrics(subject)["linear_top1"] > 0.9
    subject.model.known_outputs = ("logits", "features")  # type: ignore[misc]  # the stand-in
    with pytest.raises(UserError, match="class token"):
        probe(inputs="blocks").check(subject)


# ---- training -----------------------------------------------------------------------------------

THREE_RATES, STEPS, BATCH, CHOSEN = (0.01, 0.5, 3.0), 12, 16, np.arange(2, 40)


def test_heads_equal_torch_sgd() -> None:
    values = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(40) % 3
    rows = Features(samples=np.arange(40), values_ND=values, labels_N=labels)
    options: Any = {"chosen": CHOSEN, "num_classes": 3, "rates": THREE_RATES, "batch": BATCH}
    options |= {"seed": 1, "device": WORLD.device}
    first, found = (train_heads(rows, steps=steps, **options) for steps in (0, STEPS))
    for number, rate in enumerate(THREE_RATES):
        layer = torch.nn.Linear(6, 3)
        with torch.no_grad():
            layer.weight.copy_(first[number, :, :-1])
            layer.bias.zero_()
        sgd = torch.optim.SGD(layer.parameters(), lr=rate * BATCH / 256, momentum=0.9)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, T_max=STEPS)
        batches = epoch_batches(len(CHOSEN), batch=BATCH, seed=1)
        for rows_B in itertools.islice(batches, STEPS):
            chosen = CHOSEN[rows_B]
            loss = torch.nn.functional.cross_entropy(layer(values[chosen]), labels[chosen])
            sgd.zero_grad()
            loss.backward()
            sgd.step()
            cosine.step()
        alone = torch.cat([layer.weight, layer.bias[:, None]], dim=1)
        assert torch.allclose(found[number], alone, atol=1e-5)


def test_every_epoch_takes_each_row_once_in_a_new_order() -> None:
    batches = itertools.islice(epoch_batches(38, batch=19, seed=0), 200)
    epochs = np.concatenate(list(batches)).reshape(100, 38)
    assert all(sorted(epoch) == list(range(38)) for epoch in epochs.tolist())
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 100
