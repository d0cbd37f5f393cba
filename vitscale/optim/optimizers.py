"""Build optimisers as the recipes use them, and the two that torch does not have.

The table of optimisers is in `settings`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from vitscale.optim.settings import OptimSettings

# Values that `MaskedAdam` updates at a time; it needs memory for four times as many.
CHUNK_ELEMENTS = 25_000_000
Tensors = tuple[torch.Tensor, ...] | list[torch.Tensor]


def optimizer_groups(
    named: Iterable[tuple[str, torch.nn.Parameter]],
    *,
    settings: OptimSettings,
    decayed: Callable[[str, torch.Tensor], bool],
    layers_above: Callable[[str], int],
) -> list[dict[str, Any]]:
    """Groups by `lr_scale` (see `Engine.set_learning_rate`), each split into decayed and not.

    Parameters that need no gradient are in none. Never an empty one, on which some optimisers fail.
    `layers_above` a parameter: 0 for the head, depth + 1 for the embedding; the numbering of BEiT
    (Bao et al. 2022) and MAE (He et al. 2022), `get_layer_id_for_vit`. Independent decay: torch
    multiplies it by (schedule * peak * lr_scale), of which big_vision (optax.py: rates, then decay,
    then schedule) keeps the schedule alone; the rest is divided out here.
    """
    groups: dict[tuple[float, bool], dict[str, Any]] = {}
    for name, parameter in named:
        if not parameter.requires_grad:
            continue
        scale = (
            1.0
            if settings.layer_decay == 1
            else settings.layer_decay ** layers_above(name)
        )
        rate = (
            settings.lr * scale if settings.weight_decay_mode == "independent" else 1.0
        )
        with_decay = decayed(name, parameter)
        decay = settings.weight_decay / rate if with_decay else 0.0
        group = {"params": [], "weight_decay": decay, "lr_scale": scale}
        groups.setdefault((scale, not with_decay), group)["params"].append(parameter)
    # Sorted: rates rise from the embedding to the head, decayed before not decayed.
    return [groups[key] for key in sorted(groups)]


def build_optimizer(
    groups: list[dict[str, Any]], *, settings: OptimSettings
) -> torch.optim.Optimizer:
    """The optimiser of the settings, with torch's fused kernels, which need no compiler.

    On a CPU they take 0.28 of the time (AdamW, 5 M values, one core, November 2026).
    """
    if settings.name == "sgd":
        return torch.optim.SGD(
            groups, lr=settings.lr, momentum=settings.momentum, fused=True
        )
    moments: dict[str, Any] = {
        "lr": settings.lr,
        "betas": settings.betas,
        "eps": settings.eps,
    }
    if settings.name == "lamb":
        return Lamb(groups, **moments)
    if settings.momentum_dtype == "bf16":
        return Bf16MomentumAdamW(groups, **moments)
    return torch.optim.AdamW(groups, **moments, fused=True)


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
            together: list[torch.Tensor] = []
            for parameter in group["params"]:
                if parameter.grad is not None:
                    together.append(parameter)
                if sum(each.numel() for each in together) > CHUNK_ELEMENTS:
                    self._update(together, group)
                    together = []
            if together:
                self._update(together, group)

    def _first_moments(self, kept: Tensors, gradients: Tensors, beta: float) -> Tensors:
        """The new first moments, in the gradients' type."""
        return torch._foreach_lerp(kept, gradients, 1 - beta)

    def _changed(
        self, parameters: Tensors, directions: Tensors, group: dict[str, Any]
    ) -> None:
        """Make new parameters of `directions`: Adam's, without rate and decay."""
        raise NotImplementedError

    def _update(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        device = parameters[0].device
        for parameter in parameters:
            if not self.state[parameter]:
                state = {"step": torch.zeros((), dtype=torch.float32, device=device)}
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name] = torch.zeros_like(
                        parameter, dtype=self.state_dtypes.get(name)
                    )
                self.state[parameter] = state
        steps, means, squares = (
            [self.state[each][name] for each in parameters]
            for name in ("step", "exp_avg", "exp_avg_sq")
        )
        skipped = (
            torch.zeros((), device=device) if self.found_inf is None else self.found_inf
        )
        gradients: Any = [each.grad for each in parameters]
        if self.grad_scale is not None:
            gradients = torch._foreach_div(gradients, self.grad_scale)
        beta1, beta2 = group["betas"]
        torch._foreach_add_(steps, 1.0 - skipped)
        # In fp64: 1 - 0.999 in fp32 is off by 5e-5.
        counts = torch.stack(steps).double()
        new_means = self._first_moments(means, gradients, beta1)
        new_squares = torch._foreach_mul(squares, beta2)
        torch._foreach_addcmul_(new_squares, gradients, gradients, value=1 - beta2)
        del gradients
        deviations = torch._foreach_div(new_squares, (1 - beta2**counts).unbind())
        torch._foreach_sqrt_(deviations)
        torch._foreach_add_(deviations, group["eps"])
        changed = torch._foreach_div(new_means, (1 - beta1**counts).unbind())
        torch._foreach_div_(changed, deviations)
        del deviations
        self._changed(parameters, changed, group)
        keep = skipped.bool()
        for old, new in zip(
            [*means, *squares, *parameters],
            [*new_means, *new_squares, *changed],
            strict=True,
        ):
            torch.where(keep, old, new.to(old.dtype), out=old)


class Bf16MomentumAdamW(MaskedAdam):
    """Loshchilov & Hutter 2019, algorithm 2, with 6 bytes of moments per value instead of 8.

    As optax's `scale_by_adam(mu_dtype="bfloat16")`, which big_vision's ViT recipes use: all is
    computed in fp32 but the decayed moment, the update uses the new moment before rounding, and the
    rounded one is kept. A Python number takes the type of the array it meets in JAX: a decay of 0.9
    is 0.8984375, and the product is in bf16 too.
    """

    state_dtypes = {"exp_avg": torch.bfloat16}

    def _first_moments(self, kept: Tensors, gradients: Tensors, beta: float) -> Tensors:
        decayed = torch._foreach_mul(
            kept, torch.tensor(beta, dtype=torch.bfloat16).item()
        )
        new = torch._foreach_mul(gradients, 1 - beta)
        torch._foreach_add_(new, decayed)
        return new

    def _changed(
        self, parameters: Tensors, directions: Tensors, group: dict[str, Any]
    ) -> None:
        torch._foreach_mul_(directions, -group["lr"])
        kept = torch._foreach_mul(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(directions, kept)


class Lamb(MaskedAdam):
    """You et al. 2020 (Large Batch Optimization for Deep Learning), algorithm 2, phi the identity.

    As in the fused LAMB of apex that DeiT-III used (`multi_tensor_lamb.cu` with `use_nvlamb` false,
    the default), groups without weight decay (biases, norms, layer scales) take Adam's plain step,
    and so does a tensor whose norm or whose update is zero (a fresh head). Unlike it, clipping of
    the global norm, at 1 there, is not built in: see `optim.clip_norm`.
    """

    def _changed(
        self, parameters: Tensors, directions: Tensors, group: dict[str, Any]
    ) -> None:
        if group["weight_decay"]:
            torch._foreach_add_(directions, parameters, alpha=group["weight_decay"])
            size, change = (
                torch.stack(torch._foreach_norm(each))
                for each in (parameters, directions)
            )
            # Both sides are computed on the device: asking the host would stop it at every tensor.
            ratio = torch.where((size > 0) & (change > 0), size / change, 1.0)
            torch._foreach_mul_(directions, ratio.unbind())
        torch._foreach_mul_(directions, -group["lr"])
        torch._foreach_add_(directions, parameters)
