"""LARS: momentum, with the gradient of every kernel scaled to the norm of the kernel itself.

Needs whole tensors, as LAMB does (`lamb`).
"""

from __future__ import annotations

from typing import Any

import torch

from vitscale.optim.masked_adam import MaskedOptimizer
from vitscale.optim.settings import OptimSettings


def build(groups: list[dict[str, Any]], settings: OptimSettings, *, fused: bool) -> Lars:
    return Lars(
        groups, lr=settings.lr, momentum=settings.momentum, trust=settings.trust_coefficient
    )


class Lars(MaskedOptimizer):
    """You et al. 2017 (Large Batch Training of Convolutional Networks), as MAE's `util/lars.py`.

    The rate multiplies the momentum, which holds scaled gradients. Vectors (biases, norms) have
    neither scaling nor weight decay.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        momentum: float = 0.9,
        trust: float = 0.001,
        weight_decay: float = 0.0,
    ) -> None:
        values = {"lr": lr, "momentum": momentum, "trust": trust, "weight_decay": weight_decay}
        super().__init__(params, values | {"fused": True})

    def _update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]
    ) -> None:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        if self.grad_scale is not None:
            gradient = gradient / self.grad_scale
        if parameter.ndim > 1:
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
            size = torch.linalg.vector_norm(parameter)
            change = torch.linalg.vector_norm(gradient)
            # On the device: asking the host would stop it at every tensor.
            ratio = group["trust"] * size / change
            gradient = gradient * torch.where((size > 0) & (change > 0), ratio, 1.0)
        momentum = group["momentum"] * state["momentum_buffer"] + gradient
        changed = parameter - group["lr"] * momentum
        zero = torch.zeros((), device=parameter.device)
        skip = (zero if self.found_inf is None else self.found_inf).bool()
        for old, new in ((parameter, changed), (state["momentum_buffer"], momentum)):
            old.copy_(torch.where(skip, old, new))
