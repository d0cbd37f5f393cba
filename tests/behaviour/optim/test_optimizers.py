"""Optimisers equal the published algorithms where a whole training does not show it.

Their groups, decay and schedules in trainings: tests/behaviour/engine/test_reference.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vitscale.optim import optimizers
from vitscale.optim.optimizers import (
    Bf16MomentumAdamW,
    Lamb,
    MaskedOptimizer,
    build_optimizer,
)
from vitscale.optim.settings import OPTIMIZERS, OptimSettings


@pytest.mark.parametrize(
    ("name", "momentum_dtype"),
    [*((name, "fp32") for name in OPTIMIZERS), ("adamw", "bf16")],
)
def test_table_lists_the_state_of_each_optimizer(
    name: str, momentum_dtype: Any
) -> None:
    settings = OptimSettings(name=name, lr=0.1, momentum_dtype=momentum_dtype)
    weight = torch.nn.Parameter(torch.ones(4, 3))
    optimizer = build_optimizer(
        [{"params": [weight], "weight_decay": 0.0}], settings=settings
    )
    weight.grad = torch.ones(4, 3)
    optimizer.step()
    state = dict(optimizer.state[weight])
    state.pop("step", None)
    assert tuple(state) == OPTIMIZERS[name].state_names
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    assert num_bytes / weight.numel() == settings.state_bytes_per_parameter


@pytest.mark.parametrize("gradient", [3.0, 0.0])
def test_lamb_takes_the_step_of_adam_where_a_norm_is_zero(gradient: float) -> None:
    """A fresh head has no size to keep; Adam's first step is one learning rate."""
    head = torch.nn.Parameter(torch.zeros(2, 4))
    optimizer = Lamb([{"params": [head], "weight_decay": 0.02}], lr=0.1)
    head.grad = torch.full((2, 4), gradient)
    optimizer.step()
    right = -0.1 if gradient else 0.0
    torch.testing.assert_close(head.detach(), torch.full((2, 4), right))


def test_adamw_with_a_bf16_moment_equals_the_algorithm_over_20_steps() -> None:
    """In fp64 except for the kept and the decayed moment; the update uses it before rounding."""
    (beta1, beta2), random = (0.9, 0.99), torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.ones(5, 3))
    optimizer = Bf16MomentumAdamW(
        [weight], lr=1e-2, betas=(beta1, beta2), weight_decay=0.1
    )
    slow, mean, square = (
        torch.ones(5, 3).double(),
        torch.zeros(5, 3),
        torch.zeros(5, 3).double(),
    )
    for step in range(1, 21):
        gradient = torch.randn(5, 3, generator=random)
        weight.grad = gradient.clone()
        optimizer.step()
        # 0.9 in bf16 has 8 bits: 230 / 256. So has the product, in JAX.
        decayed_mean = (mean.double() * 230 / 256).bfloat16().double()
        exact = decayed_mean + (1 - beta1) * gradient.double()
        square = beta2 * square + (1 - beta2) * gradient.double() ** 2
        update = (
            exact / (1 - beta1**step) / ((square / (1 - beta2**step)).sqrt() + 1e-8)
        )
        slow = slow - 1e-2 * (update + 0.1 * slow)
        # From ours: rounding of ties is not tested here.
        mean = optimizer.state[weight]["exp_avg"].clone()
        assert mean.dtype == torch.bfloat16
        torch.testing.assert_close(mean.double(), exact, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(weight.detach().double(), slow, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", MaskedOptimizer.__subclasses__())
def test_found_inf_changes_nothing_and_grad_scale_divides(kind: type[Any]) -> None:
    """As the guard asks for; the very first update may be a skipped one."""
    scaled, divided = (torch.nn.Parameter(torch.ones(5, 3)) for _ in range(2))
    first, second = (
        kind([w], lr=1e-2, weight_decay=0.1, eps=1.0) for w in (scaled, divided)
    )
    first.grad_scale = torch.tensor(4.0)
    random = torch.Generator().manual_seed(0)
    for number, gradient in enumerate(torch.randn(4, 5, 3, generator=random)):
        before = [
            scaled.detach().clone(),
            *(v.clone() for v in first.state[scaled].values()),
        ]
        scaled.grad = torch.full_like(gradient, torch.nan if number % 2 else torch.inf)
        first.found_inf = torch.tensor(1.0)
        first.step()
        after = [scaled.detach(), *first.state[scaled].values()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=number > 0))
        assert number > 0 or not any(value.any() for value in after[1:])
        scaled.grad, divided.grad = gradient * 4, gradient * 4 / 4
        first.found_inf = torch.tensor(0.0)
        first.step()
        second.step()
    assert torch.equal(scaled, divided) and not torch.equal(scaled, torch.ones(5, 3))


def test_a_model_of_several_chunks_is_updated_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Large models are updated in parts; without decay LAMB's step is that of torch's Adam."""
    monkeypatch.setattr(optimizers, "CHUNK_ELEMENTS", 7)
    random = torch.Generator().manual_seed(0)
    slow = [torch.randn(4, generator=random).double() for _ in range(5)]
    fast = [value.clone() for value in slow]
    options: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-6}
    reference = torch.optim.Adam(slow, **options)
    optimizer = Lamb(fast, **options)
    for _ in range(3):
        for ours, theirs in zip(fast, slow, strict=True):
            ours.grad = theirs.grad = torch.randn(4, generator=random).double()
        reference.step()
        optimizer.step()
    torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-12)
