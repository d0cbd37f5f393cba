"""Build optimisers as the recipes use them, and the two that torch does not have.

The table of optimisers is in `settings`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from vitscale.optim.settings import OptimSettings


def optimizer_groups(
    named: Iterable[tuple[str, torch.nn.Parameter]],
    *,
    settings: OptimSettings,
    decayed: Callable[[str, torch.Tensor], bool],
    layers_above: Callable[[str], int],
) -> list[dict[str, Any]]:
    """Groups by `lr_scale` (see `Engine.set_learning_rate`), each split into decayed and not.

    Never an empty one, on which some optimisers fail. `layers_above` a parameter: 0 for the head,
    depth + 1 for the embedding; the numbering of BEiT (Bao et al. 2022) and MAE (He et al. 2022),
    `get_layer_id_for_vit`. Independent decay: torch multiplies it by (schedule * peak * lr_scale),
    of which big_vision (optax.py: rates, then decay, then schedule) keeps the schedule alone; the
    rest is divided out here.
    """
    groups: dict[tuple[float, bool], dict[str, Any]] = {}
    for name, parameter in named:
        scale = 1.0 if settings.layer_decay == 1 else settings.layer_decay ** layers_above(name)
        rate = settings.lr * scale if settings.weight_decay_mode == "independent" else 1.0
        with_decay = decayed(name, parameter)
        decay = settings.weight_decay / rate if with_decay else 0.0
        group = {"params": [], "weight_decay": decay, "lr_scale": scale}
        groups.setdefault((scale, not with_decay), group)["params"].append(parameter)
    # Sorted: rates rise from the embedding to the head, decayed before not decayed.
    return [groups[key] for key in sorted(groups)]


def build_optimizer(
    groups: list[dict[str, Any]], *, settings: OptimSettings, device: torch.device
) -> torch.optim.Optimizer:
    """The optimiser of the settings, with torch's fused kernels, which need no compiler.

    On a CPU they take 0.28 of the time (AdamW, 5 M values, one core, November 2026).
    """
    fused = device.type in ("cuda", "cpu")
    if settings.name == "sgd":
        return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum, fused=fused)
    moments: dict[str, Any] = {"lr": settings.lr, "betas": settings.betas, "eps": settings.eps}
    if settings.name == "lamb":
        return Lamb(groups, **moments)
    if settings.momentum_dtype == "bf16":
        return Bf16MomentumAdamW(groups, **moments)
    return torch.optim.AdamW(groups, **moments, fused=fused)


class MaskedAdam(torch.optim.Optimizer):
    """Adam's moments (Kingma & Ba 2015, algorithm 1); a subclass uses the direction.

    Has the interface of torch's fused optimisers: gradients are divided by `grad_scale`, and where
    `found_inf` is 1 nothing changes, the step count included; neither waits for the device.
    """

    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None
    state_dtypes: dict[str, torch.dtype] = {}
    """Types of the moments that are not kept in the parameter's own type."""

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

    def _first_moment(
        self, kept: torch.Tensor, gradient: torch.Tensor, beta: float
    ) -> torch.Tensor:
        """The new first moment, in the gradient's type."""
        return kept.lerp(gradient, 1 - beta)

    def _changed(
        self, parameter: torch.Tensor, direction: torch.Tensor, group: dict[str, Any]
    ) -> torch.Tensor:
        """The new parameter. `direction`: Adam's, without rate and decay; is overwritten."""
        raise NotImplementedError

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


class Bf16MomentumAdamW(MaskedAdam):
    """Loshchilov & Hutter 2019, algorithm 2, with 6 bytes of moments per value instead of 8.

    As optax's `scale_by_adam(mu_dtype="bfloat16")`, which big_vision's ViT recipes use: all is
    computed in fp32 but the decayed moment, the update uses the new moment before rounding, and the
    rounded one is kept. A Python number takes the type of the array it meets in JAX: a decay of 0.9
    is 0.8984375, and the product is in bf16 too.
    """

    state_dtypes = {"exp_avg": torch.bfloat16}

    def _first_moment(
        self, kept: torch.Tensor, gradient: torch.Tensor, beta: float
    ) -> torch.Tensor:
        decay = torch.full((), beta, dtype=torch.bfloat16, device=kept.device)
        return kept * decay + (1 - beta) * gradient

    def _changed(
        self, parameter: torch.Tensor, direction: torch.Tensor, group: dict[str, Any]
    ) -> torch.Tensor:
        change = direction.mul_(-group["lr"])
        return change.add_(parameter * (1 - group["lr"] * group["weight_decay"]))


class Lamb(MaskedAdam):
    """You et al. 2020 (Large Batch Optimization for Deep Learning), algorithm 2, phi the identity.

    As in the fused LAMB of apex that DeiT-III used (`multi_tensor_lamb.cu` with `use_nvlamb` false,
    the default), groups without weight decay (biases, norms, layer scales) take Adam's plain step,
    and so does a tensor whose norm or whose update is zero (a fresh head). Unlike it, clipping of
    the global norm, at 1 there, is not built in: see `optim.clip_norm`.
    """

    def _changed(
        self, parameter: torch.Tensor, direction: torch.Tensor, group: dict[str, Any]
    ) -> torch.Tensor:
        if group["weight_decay"]:
            direction.add_(parameter, alpha=group["weight_decay"])
            size = torch.linalg.vector_norm(parameter)
            change = torch.linalg.vector_norm(direction)
            # Both sides are computed on the device: asking the host would stop it at every tensor.
            direction.mul_(torch.where((size > 0) & (change > 0), size / change, 1.0))
        return direction.mul_(-group["lr"]).add_(parameter)
