"""LAMB: Adam's update, scaled in every tensor to the norm of the tensor itself.

Owns: the update. Works on whole tensors: under ZeRO 1 to 3, where an optimiser sees flat slices of
many tensors together, its norms would be those of slices; `optim.settings` refuses that.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class Lamb(torch.optim.Optimizer):
    """You et al. 2020 (Large Batch Optimization for Deep Learning), algorithm 2, phi the identity.

    As in the fused LAMB of apex that DeiT-III used (`multi_tensor_lamb.cu` with `use_nvlamb` false,
    the default), groups without weight decay (biases, norms, layer scales) take Adam's plain step,
    and so does a tensor whose norm or whose update is zero (a fresh head). Unlike it, clipping of
    the global norm, at 1 there, is not built in: see `optim.clip_norm`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are not used
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]
    ) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)  # on the CPU: read without wait
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        count, (beta1, beta2) = state["step"].item(), group["betas"]
        mean = state["exp_avg"].lerp_(gradient, 1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        deviation = (square / (1 - beta2**count)).sqrt_().add_(group["eps"])
        update = (mean / (1 - beta1**count)).div_(deviation)
        if group["weight_decay"]:
            update.add_(parameter, alpha=group["weight_decay"])
            size, change = torch.linalg.vector_norm(parameter), torch.linalg.vector_norm(update)
            # Both sides are computed on the device: asking the host would stop it at every tensor.
            update.mul_(torch.where((size > 0) & (change > 0), size / change, 1.0))
        parameter.add_(update, alpha=-group["lr"])
