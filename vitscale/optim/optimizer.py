"""Optimisers as the recipes use them.

Owns: parameter groups (kernels decayed, the rest not) and the choice of optimiser.
Leaves out: schedules, sharding (`engine`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from vitscale.optim.settings import OptimSettings


def parameter_groups(
    named: Iterable[tuple[str, torch.nn.Parameter]],
    *,
    weight_decay: float,
    decayed: Callable[[str, torch.Tensor], bool],
) -> list[dict[str, Any]]:
    """Two groups, decayed and not; never an empty one, on which some optimisers fail."""
    with_decay: list[torch.nn.Parameter] = []
    without: list[torch.nn.Parameter] = []
    for name, parameter in named:
        (with_decay if decayed(name, parameter) else without).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": with_decay, "weight_decay": weight_decay},
        {"params": without, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _adamw(groups: list[dict[str, Any]], settings: OptimSettings, fused: bool) -> Any:
    return torch.optim.AdamW(
        groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=fused
    )


def _sgd(groups: list[dict[str, Any]], settings: OptimSettings, fused: bool) -> Any:
    return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum, fused=fused)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"adamw": _adamw, "sgd": _sgd}
# Tensors per parameter that an optimiser carries from step to step.
STATE_NAMES = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


def build_optimizer(
    groups: list[dict[str, Any]], *, settings: OptimSettings, device: torch.device
) -> torch.optim.Optimizer:
    """The optimiser of the settings; fused kernels on GPU, which need no compiler."""
    return OPTIMIZERS[settings.name](groups, settings, device.type == "cuda")
