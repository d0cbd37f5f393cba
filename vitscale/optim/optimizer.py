"""Optimisers as the recipes use them.

Owns: parameter groups: kernels decayed, the rest not; rates by layer.
Leaves out: the optimisers (`registry`), schedules, sharding (`engine`), which layer a parameter
belongs to (`models`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from vitscale.optim.registry import OPTIMIZERS
from vitscale.optim.settings import OptimSettings


def parameter_groups(
    named: Iterable[tuple[str, torch.nn.Parameter]],
    *,
    weight_decay: float,
    decayed: Callable[[str, torch.Tensor], bool],
    lr_scale: Callable[[str], float] = lambda name: 1.0,
    peak_lr: float | None = None,
) -> list[dict[str, Any]]:
    """Groups by `lr_scale` (see `Engine.set_learning_rate`), each split into decayed and not.

    Never an empty one, on which some optimisers fail. With `peak_lr` the decay is independent of
    rates: torch multiplies it by (schedule * peak * lr_scale), of which big_vision (optax.py:
    rates, then decay, then schedule) keeps the schedule alone; the rest is divided out here.
    """
    groups: dict[tuple[float, bool], dict[str, Any]] = {}
    for name, parameter in named:
        scale, with_decay = lr_scale(name), decayed(name, parameter)
        rate = 1.0 if peak_lr is None else peak_lr * scale
        decay = weight_decay / rate if with_decay else 0.0
        group = {"params": [], "weight_decay": decay, "lr_scale": scale}
        groups.setdefault((scale, not with_decay), group)["params"].append(parameter)
    # Sorted: rates rise from the embedding to the head, decayed before not decayed.
    return [groups[key] for key in sorted(groups)]


def optimizer_groups(
    named: Iterable[tuple[str, torch.nn.Parameter]],
    *,
    settings: OptimSettings,
    decayed: Callable[[str, torch.Tensor], bool],
    layers_above: Callable[[str], int],
) -> list[dict[str, Any]]:
    """The parameter groups of the settings.

    `layers_above` a parameter: 0 for the head, depth + 1 for the embedding. Source of the
    numbering: BEiT (Bao et al. 2022) and MAE (He et al. 2022), `get_layer_id_for_vit`.
    """
    decay = settings.layer_decay
    return parameter_groups(
        named,
        weight_decay=settings.weight_decay,
        decayed=decayed,
        lr_scale=lambda name: 1.0 if decay == 1 else decay ** layers_above(name),
        peak_lr=settings.lr if settings.weight_decay_mode == "independent" else None,
    )


FUSED_DEVICES = ("cuda", "cpu")


def build_optimizer(
    groups: list[dict[str, Any]], *, settings: OptimSettings, device: torch.device
) -> torch.optim.Optimizer:
    """The optimiser of the settings, with torch's fused kernels, which need no compiler.

    On a CPU they take 0.28 of the time (AdamW, 5 M values, one core, November 2026).
    """
    fused = device.type in FUSED_DEVICES
    return OPTIMIZERS[settings.name].load().build(groups, settings, fused=fused)
