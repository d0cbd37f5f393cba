"""Build optimisers as the recipes use them, and the two that torch does not have.

The table of optimisers is in `settings`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from vitscale.optim.settings import OptimSettings

# Values that `MaskedOptimizer` updates at a time; Adam's kind needs memory for five times as many.
CHUNK_ELEMENTS = 25_000_000
Tensors = tuple[torch.Tensor, ...] | list[torch.Tensor]
State = dict[str, Tensors]


def optimizer_groups(
    named: Iterable[tuple[str, torch.nn.Parameter]],
    *,
    settings: OptimSettings,
    decayed: Callable[[str, torch.Tensor], bool],
    layers_above: Callable[[str], int],
    part_of: Callable[[str], str] = lambda name: "",
    is_backbone: Callable[[str], bool] = lambda name: False,
) -> list[dict[str, Any]]:
    """Groups by `lr_scale`, `part_of` and `is_backbone` (`Engine.set_learning_rate`), each split
    into decayed and not.

    Parameters that need no gradient are in none. Never an empty one, on which some optimisers fail.
    `layers_above` a parameter: 0 for the head, depth + 1 for the embedding; the numbering of BEiT
    (Bao et al. 2022) and MAE (He et al. 2022), `get_layer_id_for_vit`. Independent decay: torch
    multiplies it by (schedule * peak * lr_scale), of which big_vision (optax.py: rates, then decay,
    then schedule) keeps the schedule alone; the rest is divided out here.
    """
    groups: dict[tuple[float, bool, str, bool], dict[str, Any]] = {}
    for name, parameter in named:
        if not parameter.requires_grad:
            continue

        # Some models have no order of layers, and are asked for none.
        scale = 1.0
        if settings.layer_decay != 1:
            scale = settings.layer_decay ** layers_above(name)

        decay = 0.0
        is_decayed = decayed(name, parameter)
        if is_decayed:
            decay = settings.weight_decay
            if settings.weight_decay_mode == "independent":
                decay /= settings.lr * scale

        part = part_of(name)
        group: dict[str, Any] = {
            "params": [],
            "weight_decay": decay,
            "full_decay": decay,
            "lr_scale": scale,
            "part": part,
            "is_backbone": is_backbone(name),
        }
        key = (scale, not is_decayed, part, group["is_backbone"])
        groups.setdefault(key, group)["params"].append(parameter)

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


class MaskedOptimizer(torch.optim.Optimizer):
    """An optimiser with the interface of torch's fused ones; a subclass says what an update is.

    Gradients are divided by `grad_scale`, and where `found_inf` is 1 nothing changes, not even the
    step count. Neither waits for the device.
    """

    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None
    state_dtypes: dict[str, torch.dtype | None]
    """The tensors kept for each parameter, of its shape, with their types; None: its own type."""

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

    def update(self, gradients: Tensors, state: State, group: dict[str, Any]) -> State:
        """The new tensors of `state_dtypes`, and the parameters. Changes nothing in place.

        Each list of `state` has one tensor for each parameter: those of `state_dtypes`, `parameter`
        itself, and `step`, which counts this update too. group: the options, such as `lr`.
        """
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are not used
        assert closure is None
        for group in self.param_groups:
            chunk: list[torch.Tensor] = []
            for parameter in group["params"]:
                if parameter.grad is not None:
                    chunk.append(parameter)
                if sum(p.numel() for p in chunk) > CHUNK_ELEMENTS:
                    self._step_together(chunk, group)
                    chunk = []
            if chunk:
                self._step_together(chunk, group)

    def _step_together(
        self, parameters: list[torch.Tensor], group: dict[str, Any]
    ) -> None:
        device = parameters[0].device
        skipped = self.found_inf
        if skipped is None:
            skipped = torch.zeros((), device=device)

        for parameter in parameters:
            if not self.state[parameter]:
                first_state = {"step": torch.zeros((), device=device)}
                for name, dtype in self.state_dtypes.items():
                    first_state[name] = torch.zeros_like(parameter, dtype=dtype)
                self.state[parameter] = first_state
        state: State = {"parameter": parameters}
        for name in ("step", *self.state_dtypes):
            state[name] = [self.state[parameter][name] for parameter in parameters]
        torch._foreach_add_(state["step"], 1.0 - skipped)

        gradients: Any = [parameter.grad for parameter in parameters]
        if self.grad_scale is not None:
            gradients = torch._foreach_div(gradients, self.grad_scale)

        # The device decides, value by value: to ask it would stop the host at every update.
        is_kept = skipped.bool()
        for name, tensors in self.update(gradients, state, group).items():
            for old, new in zip(state[name], tensors, strict=True):
                torch.where(is_kept, old, new.to(old.dtype), out=old)


def adam_directions(
    means: Tensors, squares: Tensors, steps: Tensors, group: dict[str, Any]
) -> Tensors:
    """The direction of each update from its new moments, without rate and decay.

    Source: Kingma & Ba 2015, algorithm 1.
    """
    beta1, beta2 = group["betas"]
    # In fp64: 1 - 0.999 in fp32 is off by 5e-5.
    counts = torch.stack(list(steps)).double()
    deviations = torch._foreach_div(squares, (1 - beta2**counts).unbind())
    torch._foreach_sqrt_(deviations)
    torch._foreach_add_(deviations, group["eps"])

    directions = torch._foreach_div(means, (1 - beta1**counts).unbind())
    torch._foreach_div_(directions, deviations)
    return directions


def second_moments(squares: Tensors, gradients: Tensors, beta: float) -> Tensors:
    """The mean of squared gradients after an update."""
    new_squares = torch._foreach_mul(squares, beta)
    torch._foreach_addcmul_(new_squares, gradients, gradients, value=1 - beta)
    return new_squares


class Bf16MomentumAdamW(MaskedOptimizer):
    """Loshchilov & Hutter 2019, algorithm 2, with 6 bytes of moments per value instead of 8.

    As optax's `scale_by_adam(mu_dtype="bfloat16")`, which big_vision's ViT recipes use: all is
    computed in fp32 but the decayed moment, the update uses the new moment before rounding, and the
    rounded one is kept. A Python number takes the type of the array it meets in JAX: a decay of 0.9
    is 0.8984375, and the product is in bf16 too.
    """

    state_dtypes = {"exp_avg": torch.bfloat16, "exp_avg_sq": None}

    def update(self, gradients: Tensors, state: State, group: dict[str, Any]) -> State:
        beta1, beta2 = group["betas"]
        rounded_beta1 = torch.tensor(beta1, dtype=torch.bfloat16).item()
        decayed_means = torch._foreach_mul(state["exp_avg"], rounded_beta1)
        means = torch._foreach_mul(gradients, 1 - beta1)
        torch._foreach_add_(means, decayed_means)
        squares = second_moments(state["exp_avg_sq"], gradients, beta2)

        changed = adam_directions(means, squares, state["step"], group)
        torch._foreach_mul_(changed, -group["lr"])
        decay = 1 - group["lr"] * group["weight_decay"]
        torch._foreach_add_(changed, torch._foreach_mul(state["parameter"], decay))
        return {"parameter": changed, "exp_avg": means, "exp_avg_sq": squares}


class Lamb(MaskedOptimizer):
    """You et al. 2020 (Large Batch Optimization for Deep Learning), algorithm 2, phi the identity.

    As in the fused LAMB of apex that DeiT-III used (`multi_tensor_lamb.cu` with `use_nvlamb` false,
    the default), groups without weight decay (biases, norms, layer scales) take Adam's plain step,
    and so does a tensor whose norm or whose update is zero (a fresh head). Unlike it, clipping of
    the global norm, at 1 there, is not built in: see `optim.clip_norm`.
    """

    state_dtypes = {"exp_avg": None, "exp_avg_sq": None}

    def update(self, gradients: Tensors, state: State, group: dict[str, Any]) -> State:
        parameters = state["parameter"]
        beta1, beta2 = group["betas"]
        means = torch._foreach_lerp(state["exp_avg"], gradients, 1 - beta1)
        squares = second_moments(state["exp_avg_sq"], gradients, beta2)
        changed = adam_directions(means, squares, state["step"], group)

        if group["weight_decay"]:
            torch._foreach_add_(changed, parameters, alpha=group["weight_decay"])
            sizes = torch.stack(torch._foreach_norm(parameters))
            change_sizes = torch.stack(torch._foreach_norm(changed))
            # Both sides are computed on the device: asking the host would stop it at every tensor.
            has_ratio = (sizes > 0) & (change_sizes > 0)
            ratios = torch.where(has_ratio, sizes / change_sizes, 1.0)
            torch._foreach_mul_(changed, ratios.unbind())

        torch._foreach_mul_(changed, -group["lr"])
        torch._foreach_add_(changed, parameters)
        return {"parameter": changed, "exp_avg": means, "exp_avg_sq": squares}
