"""LARS against a slow version in numpy."""

from __future__ import annotations

import numpy as np
import torch

from vitscale.optim.lars import Lars


def test_lars_equals_the_published_algorithm_over_20_steps() -> None:
    random = np.random.default_rng(0)
    # A kernel, a bias (plain momentum, no decay), and a fresh head (norm 0: plain first step).
    slow = [random.normal(size=(4, 3)), random.normal(size=3), np.zeros((2, 4))]
    fast = [torch.nn.Parameter(torch.tensor(x)) for x in slow]
    optimizer = Lars(fast, lr=1.0, momentum=0.9, trust=0.001, weight_decay=0.02)
    moments = [np.zeros_like(x) for x in slow]
    for step in range(20):
        rate = 6.4 / (step + 1)
        optimizer.param_groups[0]["lr"] = rate
        for i, x in enumerate(slow):
            gradient = random.normal(size=x.shape)
            fast[i].grad = torch.tensor(gradient)
            if x.ndim > 1:
                gradient = gradient + 0.02 * x
                size = np.sqrt((x**2).sum())
                if size > 0:
                    gradient = gradient * 0.001 * size / np.sqrt((gradient**2).sum())
            moments[i] = 0.9 * moments[i] + gradient
            slow[i] = x - rate * moments[i]
        optimizer.step()
    for ours, expected in zip(fast, slow, strict=True):
        np.testing.assert_allclose(ours.detach().numpy(), expected, rtol=1e-9, atol=1e-12)
