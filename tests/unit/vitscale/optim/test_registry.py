"""The table of optimisers."""

from __future__ import annotations

import pytest
import torch

from vitscale.optim.optimizer import build_optimizer
from vitscale.optim.registry import OPTIMIZERS
from vitscale.optim.settings import OptimSettings, optim_problems


@pytest.mark.parametrize(
    ("name", "momentum_dtype"), [*((name, "fp32") for name in OPTIMIZERS), ("adamw", "bf16")]
)
def test_table_lists_the_state_of_each_optimizer(name: str, momentum_dtype: str) -> None:
    settings = OptimSettings(name=name, lr=0.1, momentum_dtype=momentum_dtype)
    weight = torch.nn.Parameter(torch.ones(4, 3))
    optimizer = build_optimizer(
        [{"params": [weight], "weight_decay": 0.0}], settings=settings, device=torch.device("cpu")
    )
    weight.grad = torch.ones(4, 3)
    optimizer.step()
    state = dict(optimizer.state[weight])
    assert ("step" in state) == OPTIMIZERS[name].counts_steps
    state.pop("step", None)
    assert tuple(state) == OPTIMIZERS[name].state_names
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    assert num_bytes / weight.numel() == settings.state_bytes_per_parameter


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_settings_of_other_optimizers_are_refused(name: str) -> None:
    given = {"betas": (0.9, 0.95), "eps": 1e-6, "momentum": 0.5, "momentum_dtype": "bf16"}
    given |= {"weight_decay_mode": "independent"}
    problems = dict(optim_problems(OptimSettings(name=name, lr=0.1, **given), zero_stage=0))
    others = set(given) - set(OPTIMIZERS[name].settings)
    assert set(problems) == {f"optim.{key}" for key in others}
    for key, what in problems.items():
        assert f"{name} does not use it" in what and "or set optim.name=" in what, key


def test_whole_tensors_are_refused_where_zero_shards_them() -> None:
    lamb = OptimSettings(name="lamb", lr=0.1)
    assert not list(optim_problems(lamb, zero_stage=0))
    ((key, what),) = optim_problems(lamb, zero_stage=1)
    assert key == "engine.zero_stage" and "lamb needs full-tensor norms; ZeRO 1 shards" in what
