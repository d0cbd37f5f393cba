"""AdamW with its first moment kept in bf16.

Owns: the update. Leaves out: AdamW in fp32, which is torch's own (`optimizer`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class Bf16MomentumAdamW(torch.optim.Optimizer):
    """Loshchilov & Hutter 2019, algorithm 2, with 6 bytes of moments per value instead of 8.

    As optax's `scale_by_adam(mu_dtype="bfloat16")`, which big_vision's ViT recipes use: all is
    computed in fp32, the update takes the moment before it is rounded, and the rounded one is kept.

    Speaks the interface of torch's fused optimisers: gradients are divided by `grad_scale`, and
    where `found_inf` is 1 nothing changes, the step count included; neither waits for the device.
    """

    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None
    state_dtypes = {"exp_avg": torch.bfloat16}

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        values = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, values | {"fused": True})

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
        state, device = self.state[parameter], parameter.device
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        skipped = torch.zeros((), device=device) if self.found_inf is None else self.found_inf
        if self.grad_scale is not None:
            gradient = gradient / self.grad_scale
        beta1, beta2 = group["betas"]
        count = state["step"].add_(1.0 - skipped)
        mean = state["exp_avg"].float().lerp_(gradient, 1 - beta1)
        square = torch.addcmul(state["exp_avg_sq"] * beta2, gradient, gradient, value=1 - beta2)
        deviation = (square / (1 - beta2**count)).sqrt_().add_(group["eps"])
        update = (mean / (1 - beta1**count)).div_(deviation)
        changed = parameter * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * update
        keep = skipped.bool()
        for old, new in (
            (parameter, changed),
            (state["exp_avg"], mean.to(torch.bfloat16)),
            (state["exp_avg_sq"], square),
        ):
            old.copy_(torch.where(keep, old, new))
