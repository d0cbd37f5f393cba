"""Base of our own optimisers: a step that the guard can skip on the device.

Owns: Adam's moments and direction (Kingma & Ba 2015, algorithm 1), and choosing between old and new
values. Leaves out: the use of the direction (`lamb`, `adamw`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class MaskedAdam(torch.optim.Optimizer):
    """Adam's moments; a subclass says what becomes of the direction.

    Has the interface of torch's fused optimisers: gradients are divided by `grad_scale`, and where
    `found_inf` is 1 nothing changes, the step count included; neither waits for the device.
    """

    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None
    state_dtypes: dict[str, torch.dtype] = {}
    """Of the moments that are not kept in the parameter's own type."""

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

    def _changed(
        self, parameter: torch.Tensor, direction: torch.Tensor, group: dict[str, Any]
    ) -> torch.Tensor:
        """The new parameter. `direction`: Adam's, without rate and decay; is overwritten."""
        raise NotImplementedError

    def _first_moment(
        self, kept: torch.Tensor, gradient: torch.Tensor, beta: float
    ) -> torch.Tensor:
        """The new first moment, in the gradient's type."""
        return kept.to(gradient.dtype).lerp(gradient, 1 - beta)

    def _update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]
    ) -> None:
        state, device = self.state[parameter], parameter.device
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=self.state_dtypes.get(name))
        skipped = torch.zeros((), device=device) if self.found_inf is None else self.found_inf
        if self.grad_scale is not None:
            gradient = gradient / self.grad_scale
        beta1, beta2 = group["betas"]
        # In fp64: 1 - 0.999 in fp32 is off by 5e-5.
        count = state["step"].add_(1.0 - skipped).double()
        mean = self._first_moment(state["exp_avg"], gradient, beta1)
        # Each copy of the size of the parameter is written in place or freed as soon as it can be.
        square = (state["exp_avg_sq"] * beta2).addcmul_(gradient, gradient, value=1 - beta2)
        del gradient
        deviation = (square / (1 - beta2**count)).sqrt_().add_(group["eps"])
        keep = skipped.bool()
        _replace(state["exp_avg_sq"], square, keep)
        del square
        direction = (mean / (1 - beta1**count)).div_(deviation)
        del deviation
        _replace(state["exp_avg"], mean, keep)
        del mean
        _replace(parameter, self._changed(parameter, direction, group), keep)


def _replace(old: torch.Tensor, new: torch.Tensor, keep: torch.Tensor) -> None:
    """Give `old` the new values, rounded to its type, unless `keep`."""
    torch.where(keep, old, new.to(old.dtype), out=old)
