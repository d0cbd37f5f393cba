"""AdamW with a bf16 first moment equals the algorithm written out and is close to torch's."""

from __future__ import annotations

import torch

from vitscale.optim.adamw import Bf16MomentumAdamW
from vitscale.optim.optimizer import build_optimizer
from vitscale.optim.settings import OptimSettings, optim_problems

BETAS, EPS, DECAY = (0.9, 0.99), 1e-8, 0.1


def gradients(steps: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(5, 3, generator=random) for _ in range(steps)]


def optimizer_of(weight: torch.Tensor) -> Bf16MomentumAdamW:
    return Bf16MomentumAdamW([weight], lr=1e-2, betas=BETAS, eps=EPS, weight_decay=DECAY)


def test_equals_the_algorithm_written_out_over_20_steps() -> None:
    """In fp64 except for the kept and the decayed moment; the update uses it before rounding."""
    weight = torch.nn.Parameter(torch.ones(5, 3))
    optimizer = optimizer_of(weight)
    slow, mean, square = torch.ones(5, 3).double(), torch.zeros(5, 3), torch.zeros(5, 3).double()
    for step, gradient in enumerate(gradients(20), start=1):
        weight.grad = gradient.clone()
        optimizer.step()
        # 0.9 in bf16 has 8 bits: 230 / 256. So has the product, in JAX.
        decayed = (mean.double() * 230 / 256).bfloat16().double()
        exact = decayed + (1 - BETAS[0]) * gradient.double()
        square = BETAS[1] * square + (1 - BETAS[1]) * gradient.double() ** 2
        update = exact / (1 - BETAS[0] ** step) / ((square / (1 - BETAS[1] ** step)).sqrt() + EPS)
        slow = slow - 1e-2 * (update + DECAY * slow)
        # From ours: rounding of ties is not tested here.
        mean = optimizer.state[weight]["exp_avg"].clone()
        assert mean.dtype == torch.bfloat16
        torch.testing.assert_close(mean.double(), exact, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(weight.detach().double(), slow, rtol=1e-5, atol=1e-6)


def test_stays_near_adamw_in_fp32() -> None:
    ours, theirs = (torch.nn.Parameter(torch.ones(5, 3)) for _ in range(2))
    half = optimizer_of(ours)
    whole = torch.optim.AdamW([theirs], lr=1e-2, betas=BETAS, eps=EPS, weight_decay=DECAY)
    for gradient in gradients(20):
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        half.step()
        whole.step()
    assert not torch.equal(ours, theirs)
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=5e-3)


def test_bf16_momentum_is_a_setting_of_adamw() -> None:
    half = OptimSettings(lr=1e-3, momentum_dtype="bf16")
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))]}]
    built = build_optimizer(groups, settings=half, device=torch.device("cpu"))
    assert isinstance(built, Bf16MomentumAdamW)
    assert list(optim_problems(half, zero_stage=1)) == []
