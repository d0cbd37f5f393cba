"""Our optimisers obey the guard's `found_inf` and `grad_scale` without waiting for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vitscale.optim.adamw import Bf16MomentumAdamW
from vitscale.optim.lamb import Lamb
from vitscale.optim.lars import Lars
from vitscale.optim.masked_adam import MaskedAdam


@pytest.mark.parametrize("kind", [Bf16MomentumAdamW, Lamb, Lars])
def test_found_inf_changes_nothing_and_grad_scale_divides(kind: type[Any]) -> None:
    scaled, divided = (torch.nn.Parameter(torch.ones(5, 3)) for _ in range(2))
    first, second = (kind([w], lr=1e-2, weight_decay=0.1) for w in (scaled, divided))
    for number, gradient in enumerate(
        torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(0))
    ):
        scaled.grad, divided.grad = gradient * 4, gradient * 4 / 4
        first.grad_scale, first.found_inf = torch.tensor(4.0), torch.tensor(0.0)
        first.step()
        second.step()
        before = [scaled.detach().clone(), *(v.clone() for v in first.state[scaled].values())]
        scaled.grad = torch.full_like(gradient, torch.nan if number % 2 else torch.inf)
        first.found_inf = torch.tensor(1.0)
        first.step()
        after = [scaled.detach(), *first.state[scaled].values()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert torch.equal(scaled, divided) and not torch.equal(scaled, torch.ones(5, 3))


@pytest.mark.parametrize("kind", [Bf16MomentumAdamW, Lamb])
def test_skipped_first_update_keeps_the_initial_state(kind: type[MaskedAdam]) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = kind([weight], lr=1.0)
    optimizer.found_inf, weight.grad = torch.tensor(1.0), torch.full((3,), torch.nan)
    optimizer.step()
    state = optimizer.state[weight]
    assert torch.equal(weight, torch.ones(3)) and state["step"] == 0
    assert not state["exp_avg"].any() and not state["exp_avg_sq"].any()
