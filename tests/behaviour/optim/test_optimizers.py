"""Optimisers equal the published algorithms where a whole training does not show it.

Their groups, decay and schedules in trainings: tests/behaviour/engine/test_reference.py.
"""

import copy

import pytest
import torch

from tests.support.tables import every, rows
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
def test_table_lists_the_state_of_each_optimizer(name, momentum_dtype):
    settings = OptimSettings(
        name=name,
        lr=0.1,
        momentum_dtype=momentum_dtype,
    )
    weight = torch.nn.Parameter(torch.ones(4, 3))
    group = {"params": [weight], "weight_decay": 0.0}
    optimizer = build_optimizer([group], settings=settings)
    weight.grad = torch.ones(4, 3)
    optimizer.step()

    # A count of steps is no state of the parameters.
    state = dict(optimizer.state[weight])
    state.pop("step", None)
    assert tuple(state) == OPTIMIZERS[name].state_names

    # Estimates of memory multiply this by the size of the model.
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    assert num_bytes / weight.numel() == settings.state_bytes_per_parameter


@rows("""
- [gradient, value]
- [3.0, -0.1]
- [0.0, 0.0]
""")
def test_lamb_takes_the_step_of_adam_where_a_norm_is_zero(gradient, value):
    """A fresh head has no size to keep; Adam's first step is one learning rate."""
    head = torch.nn.Parameter(torch.zeros(2, 4))
    optimizer = Lamb([{"params": [head], "weight_decay": 0.02}], lr=0.1)
    head.grad = torch.full((2, 4), gradient)
    optimizer.step()
    expected = torch.full((2, 4), value)
    torch.testing.assert_close(head.detach(), expected)


def test_adamw_with_a_bf16_moment_equals_the_algorithm_over_20_steps():
    """In fp64 except for the kept and the decayed moment; the update uses it before rounding."""
    beta1 = 0.9
    beta2 = 0.99
    random = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.ones(5, 3))
    optimizer = Bf16MomentumAdamW(
        [weight],
        lr=1e-2,
        betas=(beta1, beta2),
        weight_decay=0.1,
    )
    slow = torch.ones(5, 3).double()
    mean = torch.zeros(5, 3)
    square = torch.zeros(5, 3).double()
    for step in range(1, 21):
        gradient = torch.randn(5, 3, generator=random).double()
        weight.grad = gradient.float()
        optimizer.step()

        # 0.9 in bf16 has 8 bits: 230 / 256. So has the product, in JAX.
        decayed_mean = (mean.double() * 230 / 256).bfloat16().double()
        exact = decayed_mean + (1 - beta1) * gradient
        square = beta2 * square + (1 - beta2) * gradient**2
        deviation = (square / (1 - beta2**step)).sqrt()
        update = exact / (1 - beta1**step) / (deviation + 1e-8)
        slow = slow - 1e-2 * (update + 0.1 * slow)

        # The next step starts from our mean: rounding of ties is not tested here.
        mean = optimizer.state[weight]["exp_avg"].clone()
        assert mean.dtype == torch.bfloat16
        torch.testing.assert_close(mean.double(), exact, rtol=2**-8, atol=1e-6)
    weights = weight.detach().double()
    torch.testing.assert_close(weights, slow, rtol=1e-5, atol=1e-6)


@every(kind=MaskedOptimizer.__subclasses__())
def test_found_inf_changes_nothing_and_grad_scale_divides(kind):
    scaled = torch.nn.Parameter(torch.ones(5, 3))
    divided = torch.nn.Parameter(torch.ones(5, 3))

    # With a large eps a gradient that was not divided would give another step.
    options = {
        "lr": 1e-2,
        "weight_decay": 0.1,
        "eps": 1.0,
    }
    first = kind([scaled], **options)
    second = kind([divided], **options)
    first.grad_scale = torch.tensor(4.0)
    for bad in (torch.inf, torch.nan, torch.inf):
        before = copy.deepcopy((scaled, dict(first.state[scaled])))
        scaled.grad = torch.full((5, 3), bad)
        first.found_inf = torch.tensor(1.0)
        first.step()

        # A state that the skipped step made is zero.
        weight, state = before
        assert torch.equal(scaled, weight)
        for name, value in first.state[scaled].items():
            assert torch.equal(value, state.get(name, torch.zeros_like(value)))

        # Powers of two change no digit.
        divided.grad = torch.randn(5, 3)
        scaled.grad = divided.grad * 4
        first.found_inf = torch.tensor(0.0)
        first.step()
        second.step()
    # The two have taken steps at all.
    assert torch.equal(scaled, divided)
    assert not torch.equal(scaled, torch.ones(5, 3))


def test_a_model_of_several_chunks_is_updated_once(monkeypatch):
    """Large models are updated in parts; without decay LAMB's step is that of torch's Adam."""
    monkeypatch.setattr(optimizers, "CHUNK_ELEMENTS", 7)
    random = torch.Generator().manual_seed(0)
    slow = torch.randn(5, 4, generator=random).double().unbind()
    fast = [value.clone() for value in slow]
    options = {
        "lr": 0.1,
        "betas": (0.9, 0.99),
        "eps": 1e-6,
    }

    # Seven elements a chunk: borders fall between and within parameters.
    reference = torch.optim.Adam(slow, **options)
    optimizer = Lamb(fast, **options)
    for _ in range(3):
        for ours, theirs in zip(fast, slow, strict=True):
            theirs.grad = torch.randn(4, generator=random).double()
            ours.grad = theirs.grad
        reference.step()
        optimizer.step()
    torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-12)
