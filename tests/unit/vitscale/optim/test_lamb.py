"""LAMB against algorithm 2 of You et al. 2020, written out in fp64 numpy."""

from __future__ import annotations

import numpy as np
import torch

from vitscale.optim.lamb import Lamb


def test_lamb_equals_the_published_algorithm_over_20_steps() -> None:
    random = np.random.default_rng(0)
    beta1, beta2, eps, decay = 0.9, 0.99, 1e-6, 0.02
    # A kernel, a bias without decay (plain Adam), and a fresh head (norm 0: plain first step).
    slow = [random.normal(size=(4, 3)), random.normal(size=3), np.zeros((2, 4))]
    decays = [decay, 0.0, decay]
    fast = [torch.nn.Parameter(torch.tensor(x)) for x in slow]
    optimizer = Lamb(
        [{"params": [p], "weight_decay": d} for p, d in zip(fast, decays, strict=True)],
        lr=1.0, betas=(beta1, beta2), eps=eps,
    )  # fmt: skip
    mean = [np.zeros_like(x) for x in slow]
    square = [np.zeros_like(x) for x in slow]
    for step in range(20):
        rate = 0.1 / (step + 1)
        for group in optimizer.param_groups:
            group["lr"] = rate
        for i, x in enumerate(slow):
            gradient = random.normal(size=x.shape)
            fast[i].grad = torch.tensor(gradient)
            mean[i] = beta1 * mean[i] + (1 - beta1) * gradient
            square[i] = beta2 * square[i] + (1 - beta2) * gradient**2
            update = mean[i] / (1 - beta1 ** (step + 1))
            update = update / (np.sqrt(square[i] / (1 - beta2 ** (step + 1))) + eps)
            update = update + decays[i] * x
            size, change = np.sqrt((x**2).sum()), np.sqrt((update**2).sum())
            ratio = size / change if decays[i] and size > 0 else 1.0
            slow[i] = x - rate * ratio * update
        optimizer.step()
    for ours, expected in zip(fast, slow, strict=True):
        np.testing.assert_allclose(ours.detach().numpy(), expected, rtol=1e-9, atol=1e-12)


def test_kernel_step_is_a_fraction_of_its_norm() -> None:
    for scale in (1e-3, 1e3):
        weight = torch.nn.Parameter(torch.full((8, 8), 2.0))
        before = weight.detach().clone()
        weight.grad = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)) * scale
        Lamb([weight], lr=0.01, weight_decay=0.02).step()
        moved = (weight.detach() - before).norm() / before.norm()
        torch.testing.assert_close(moved, torch.tensor(0.01))
