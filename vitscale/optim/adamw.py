"""AdamW: torch's own, or one that keeps its first moment in bf16."""

from __future__ import annotations

from typing import Any

import torch

from vitscale.optim.masked_adam import MaskedAdam
from vitscale.optim.settings import OptimSettings


def decayed_bf16(kept: torch.Tensor, decay: float) -> torch.Tensor:
    """`kept` times `decay`, both factors and the product in bf16.

    So in JAX, where a Python number takes the type of the array it meets: a decay of 0.9 is
    0.8984375.
    """
    return kept * torch.full((), decay, dtype=torch.bfloat16, device=kept.device)


def build(
    groups: list[dict[str, Any]], settings: OptimSettings, *, fused: bool
) -> torch.optim.Optimizer:
    if settings.momentum_dtype == "bf16":
        return Bf16MomentumAdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)
    return torch.optim.AdamW(
        groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=fused
    )


class Bf16MomentumAdamW(MaskedAdam):
    """Loshchilov & Hutter 2019, algorithm 2, with 6 bytes of moments per value instead of 8.

    As optax's `scale_by_adam(mu_dtype="bfloat16")`, which big_vision's ViT recipes use: all is
    computed in fp32 but the decayed moment, the update uses the new moment before rounding, and the
    rounded one is kept.
    """

    state_dtypes = {"exp_avg": torch.bfloat16}

    def _first_moment(
        self, kept: torch.Tensor, gradient: torch.Tensor, beta: float
    ) -> torch.Tensor:
        return decayed_bf16(kept, beta) + (1 - beta) * gradient

    def _changed(
        self, parameter: torch.Tensor, direction: torch.Tensor, group: dict[str, Any]
    ) -> torch.Tensor:
        change = direction.mul_(-group["lr"])
        return change.add_(parameter * (1 - group["lr"] * group["weight_decay"]))
