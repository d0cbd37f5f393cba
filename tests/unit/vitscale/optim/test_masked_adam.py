"""Our optimisers obey the guard's `found_inf` and `grad_scale` without waiting for the device."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vitscale.optim.lamb import Lamb
from vitscale.optim.masked_adam import MaskedAdam
from vitscale.optim.registry import OPTIMIZERS

for entry in OPTIMIZERS.values():
    entry.load()
KINDS = MaskedAdam.__subclasses__()


@pytest.mark.parametrize("kind", KINDS)
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


@pytest.mark.parametrize("kind", KINDS)
def test_skipped_first_update_keeps_the_initial_state(kind: type[MaskedAdam]) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = kind([weight], lr=1.0)
    optimizer.found_inf, weight.grad = torch.tensor(1.0), torch.full((3,), torch.nan)
    optimizer.step()
    state = optimizer.state[weight]
    assert torch.equal(weight, torch.ones(3)) and state["step"] == 0
    assert not state["exp_avg"].any() and not state["exp_avg_sq"].any()


class LiveTensors(TorchDispatchMode):
    """The most tensors of one size that exist at once, of those made in the block."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.most, self._numel, self._made = 0, numel, []  # type: ignore[var-annotated]  # weak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.numel() == self._numel:
            self._made.append(weakref.ref(made))
            alive = {id(each()) for each in self._made if each() is not None}
            self.most = max(self.most, len(alive - {id(each) for each in args}))
        return made


@pytest.mark.parametrize("kind", KINDS)
def test_update_holds_few_copies_of_a_tensor(kind: type[MaskedAdam]) -> None:
    """Beside weights, gradient and moments; a fused kernel would need none."""
    weight = torch.nn.Parameter(torch.ones(7, 3))
    optimizer = kind([weight], lr=1e-2, weight_decay=0.1)
    optimizer.grad_scale = torch.tensor(2.0)
    for _ in range(2):
        weight.grad = torch.ones(7, 3)
        with LiveTensors(weight.numel()) as live:
            optimizer.step()
    assert 1 < live.most <= 4


@pytest.mark.parametrize("kind", KINDS)
def test_update_in_place_keeps_all_bits(kind: type[MaskedAdam]) -> None:
    """Beside the formula with a new tensor for every operation."""
    random = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(70, 30, generator=random))
    optimizer = kind([weight], lr=1e-2, weight_decay=0.1)
    slow = weight.detach().clone()
    mean = torch.zeros(70, 30, dtype=kind.state_dtypes.get("exp_avg", torch.float32))
    square = torch.zeros(70, 30)
    for step in range(1, 6):
        weight.grad = torch.randn(70, 30, generator=random)
        first = optimizer._first_moment(mean, weight.grad, 0.9)
        square = torch.addcmul(square * 0.999, weight.grad, weight.grad, value=1 - 0.999)
        deviation = (square / (1 - 0.999 ** torch.tensor(step).double())).sqrt() + 1e-8
        direction = first / (1 - 0.9 ** torch.tensor(step).double()) / deviation
        if kind is Lamb:
            direction = direction.add(slow, alpha=0.1)
            direction = direction * (slow.norm() / direction.norm())
            slow = slow - 1e-2 * direction
        else:
            slow = slow * (1 - 1e-2 * 0.1) - 1e-2 * direction
        mean = first.to(mean.dtype)
        optimizer.step()
    state = optimizer.state[weight]
    for ours, expected in ((weight, slow), (state["exp_avg"], mean), (state["exp_avg_sq"], square)):
        assert torch.equal(ours, expected)
