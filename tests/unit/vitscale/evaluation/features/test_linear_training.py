"""Heads trained together equal heads trained alone with torch's SGD and cosine schedule."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.engine.array_subject import WORLD
from vitscale.evaluation.features.linear_training import ParallelHeads, _positions, train_heads
from vitscale.evaluation.features.rows import Features

RATES, STEPS, BATCH, CHOSEN = (0.01, 0.5, 3.0), 12, 16, np.arange(2, 40)


def features() -> Features:
    random = torch.Generator().manual_seed(0)
    return Features(
        samples=np.arange(40),
        values_ND=torch.randn(40, 6, generator=random),
        labels_N=torch.arange(40) % 3,
    )


@pytest.mark.usefixtures("group")
def test_heads_equal_torch_sgd() -> None:
    rows = features()
    heads = ParallelHeads(len(RATES), width=6, num_classes=3, seed=1)
    first = heads.weights_HCD.clone()
    train_heads(
        heads,
        rows,
        chosen=CHOSEN,
        rates=RATES,
        steps=STEPS,
        batch=BATCH,
        seed=1,
        device=WORLD.device,
    )
    for number, rate in enumerate(RATES):
        layer = torch.nn.Linear(6, 3)
        with torch.no_grad():
            layer.weight.copy_(first[number, :, :-1])
            layer.bias.zero_()
        sgd = torch.optim.SGD(layer.parameters(), lr=rate * BATCH / 256, momentum=0.9)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, T_max=STEPS)
        for step in range(STEPS):
            chosen = CHOSEN[_positions(step * BATCH, BATCH, num=len(CHOSEN), seed=1)]
            loss = torch.nn.functional.cross_entropy(
                layer(rows.values_ND[chosen]), rows.labels_N[chosen]
            )
            sgd.zero_grad()
            loss.backward()
            sgd.step()
            cosine.step()
        alone = torch.cat([layer.weight, layer.bias[:, None]], dim=1)
        assert torch.allclose(heads.weights_HCD[number], alone, atol=1e-5)


def test_every_epoch_takes_each_row_once_in_a_new_order() -> None:
    batches = [_positions(first, 16, num=38, seed=0) for first in range(0, 38 * 16, 16)]
    epochs = np.concatenate(batches).reshape(16, 38)
    assert all(sorted(epoch) == list(range(38)) for epoch in epochs.tolist())
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 16
