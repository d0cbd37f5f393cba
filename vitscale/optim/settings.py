"""The groups `optim` and `schedule`, which settings go together, and the learning rate by step.

Needs no torch. A new optimiser is an entry of `OPTIMIZERS` and a branch of `build_optimizer`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from vitscale.config.section import Items, Pair, Problems, Section


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerKind:
    """What an optimiser reads of the settings, and what it keeps from step to step."""

    settings: tuple[str, ...]
    """Keys of `optim` that not every optimiser has; another optimiser refuses them."""
    state_names: tuple[str, ...]
    """Tensors it keeps for each parameter, of its shape, in fp32; `step` may lie beside them."""
    needs_whole_tensors: bool = False
    """Whether it needs norms of whole tensors: ZeRO 1 to 3 give it slices of many together."""


MOMENTS = ("exp_avg", "exp_avg_sq")
OPTIMIZERS = {
    "adamw": OptimizerKind(
        settings=("betas", "eps", "momentum_dtype", "weight_decay_mode"),
        state_names=MOMENTS,
    ),
    "sgd": OptimizerKind(settings=("momentum",), state_names=("momentum_buffer",)),
    "lamb": OptimizerKind(
        settings=("betas", "eps"), state_names=MOMENTS, needs_whole_tensors=True
    ),
}
# Share of (peak - final) left after a share `progress` in [0, 1] of the curve's steps, which begin
# at `decay_from`.
SCHEDULES: dict[str, Callable[[float, tuple[float, ...]], float]] = {
    "cosine": lambda progress, drops_at: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "linear": lambda progress, drops_at: 1.0 - progress,
    "constant": lambda progress, drops_at: 1.0,
    "drops": lambda progress, drops_at: (
        0.1 ** sum(progress >= drop for drop in drops_at)
    ),
}


def cosine(start: float, end: float, progress: float) -> float:
    """From `start` to `end`, by half a cosine; progress: share of the way in [0, 1]."""
    return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


class EmaSettings(Section):
    """Exponential moving average of the weights."""

    decay: float = Field(default=0.9999, ge=0, lt=1)
    """What the average keeps of itself at every step. Dosovitskiy et al. 2021, table 2: 0.9999
    (there called Polyak averaging)."""
    warmup: bool = True
    """Keep at most (1 + n) / (10 + n) at step n, so that a short run's average is not its start.
    Published recipes do without."""
    final_decay: float | None = Field(default=None, ge=0, le=1)
    """What it keeps at the last step; a cosine leads there from `decay`. DINO: 0.996 to 1. null:
    `decay`."""

    def decay_at(self, step: int, total_steps: int) -> float:
        """What is kept at the `step`-th of all steps, the first being 1."""
        decay = self.decay
        if self.final_decay is not None:
            decay = cosine(decay, self.final_decay, (step - 1) / total_steps)
        if self.warmup:
            return min(decay, (1 + step) / (10 + step))
        return decay


class OptimSettings(Section):
    """The optimiser."""

    name: Literal[tuple(OPTIMIZERS)] = "adamw"  # type: ignore[valid-type]
    """lamb needs full-tensor norms, which ZeRO 1 to 3 shard: set engine.zero_stage=0."""
    lr: PositiveFloat
    """Peak learning rate at the configured global batch; never rescaled automatically."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW scale (times the learning rate). On kernels only: no bias, norm, token, position."""
    final_weight_decay: float | None = Field(default=None, ge=0)
    """Weight decay at the last step; a cosine leads there from `weight_decay`. DINO: 0.04 to 0.4.
    null: `weight_decay`."""
    weight_decay_mode: Literal["coupled", "independent"] = "coupled"
    """coupled: a step decays by its learning rate times `weight_decay` (torch). independent: by
    (its learning rate / the peak) times `weight_decay` (big_vision), whatever the peak and the
    layer: 1e-4 there is 0.1 coupled at a peak of 1e-3. adamw only."""
    layer_decay: float = Field(default=1.0, gt=0, le=1)
    """Learning rate of a layer over that of the layer above it; head 1, patch embedding
    layer_decay ** (depth + 1). For fine-tuning (BEiT, MAE); 1: the same rate everywhere."""
    betas: Pair = (0.9, 0.999)
    """Decay per step of the first and second moment; adamw and lamb."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment; adamw and lamb."""
    momentum_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of adamw's first moment. bf16 saves 2 bytes a parameter (big_vision, AugReg)."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """sgd only."""
    clip_norm: PositiveFloat | None = None
    """Global gradient norm above which gradients are scaled down; null: never."""
    ema: EmaSettings | None = None
    """Keep an average of the weights, evaluate it, and start transfers from it; null: none."""

    def decay_factor(self, step: int, total_steps: int) -> float:
        """Factor of `weight_decay` at a step, the first being 0."""
        if self.final_weight_decay is None:
            return 1.0
        progress = step / total_steps
        decay = cosine(self.weight_decay, self.final_weight_decay, progress)
        return decay / self.weight_decay

    @property
    def state_bytes_per_parameter(self) -> int:
        """Memory of the optimiser states, without the average of the weights."""
        saved = 2 if self.momentum_dtype == "bf16" else 0
        return 4 * len(OPTIMIZERS[self.name].state_names) - saved


def optim_problems(optim: OptimSettings, *, zero_stage: int) -> Problems:
    """Combinations that would be ignored or wrong."""
    if not all(0 <= beta < 1 for beta in optim.betas):
        yield "optim.betas", f"{optim.betas} must both be at least 0 and below 1"
    if optim.final_weight_decay is not None and not optim.weight_decay:
        yield "optim.final_weight_decay", "needs optim.weight_decay; set it above 0"
    fields = type(optim).model_fields
    for key in fields:
        users = [name for name, kind in OPTIMIZERS.items() if key in kind.settings]
        is_set = getattr(optim, key) != fields[key].default
        if users and optim.name not in users and is_set:
            what = f"{optim.name} does not use it; remove the key"
            yield f"optim.{key}", f"{what}, or set optim.name={' or '.join(users)}"
    if OPTIMIZERS[optim.name].needs_whole_tensors and zero_stage != 0:
        what = f"{optim.name} needs full-tensor norms; ZeRO {zero_stage} shards them"
        yield (
            "engine.zero_stage",
            f"{what}; set engine.zero_stage=0, or optim.name=adamw",
        )


class ScheduleSettings(Section):
    """Length of the run and learning rate over its steps."""

    epochs: PositiveFloat | None = None
    """Passes over the training split; give this or `steps`."""
    steps: PositiveInt | None = None
    """Optimiser steps; give this or `epochs`."""
    warmup_steps: NonNegativeInt = 0
    """Linear rise from 0 to the peak."""
    warmup_epochs: float = Field(default=0.0, ge=0)
    """The same in passes over the training split (DeiT, MAE); give at most one of the two."""
    decay: Literal[tuple(SCHEDULES)] = "cosine"  # type: ignore[valid-type]
    """Curve after the warm-up. drops: divided by 10 at each of `drops_at` (BiT)."""
    drops_at: Items[float] = ()
    """drops only: shares of all steps, warm-up included, in increasing order."""
    decay_from: Literal["start", "warmup_end"] = "warmup_end"
    """cosine and linear only. start: the curve begins at step 0 and the warm-up replaces its first
    part, as in timm and DeiT. warmup_end: it begins after the warm-up, as in ViT, AugReg, MAE."""
    final_lr: float = Field(default=0.0, ge=0)
    """Learning rate at the last step."""
    cooldown_share: float = Field(default=0.0, ge=0, lt=1)
    """constant only: the last share of all steps, which brings the rate to `final_lr` linearly."""
    freeze_backbone_steps: NonNegativeInt = 0
    """Steps in which only heads are trained: classifiers, and what the objective adds. For new
    heads on a trained backbone, which stays as it is to the bit; a step costs the same."""
    backbone_ramp_steps: NonNegativeInt = 0
    """Steps after those, in which the backbone's learning rate rises linearly to its own."""

    @property
    def is_staged(self) -> bool:
        """Whether the backbone has a learning rate of its own for some steps."""
        return bool(self.freeze_backbone_steps or self.backbone_ramp_steps)

    def backbone_factor(self, step: int) -> float:
        """Factor of the backbone's learning rate at a step, the first being 0."""
        num_free = step - self.freeze_backbone_steps + 1
        return min(1.0, max(0, num_free) / max(1, self.backbone_ramp_steps))


def schedule_problems(schedule: ScheduleSettings) -> Problems:
    """Combinations in which a setting could have no effect."""
    decay = f"schedule.decay={schedule.decay}"
    at = schedule.drops_at

    if schedule.warmup_steps and schedule.warmup_epochs:
        yield (
            "schedule.warmup_epochs",
            "and warmup_steps exclude each other; set one to 0",
        )
    if schedule.decay != "constant" and schedule.cooldown_share:
        what = f"{decay} ends at final_lr by itself"
        yield (
            "schedule.cooldown_share",
            f"{what}; set it to 0, or schedule.decay=constant",
        )

    if schedule.decay in ("constant", "drops") and schedule.decay_from != "warmup_end":
        yield "schedule.decay_from", f"has no effect on {decay}; set it to warmup_end"
    if (
        schedule.decay == "constant"
        and schedule.final_lr
        and not schedule.cooldown_share
    ):
        what = f"constant never reaches {schedule.final_lr}"
        yield (
            "schedule.final_lr",
            f"{what}; set schedule.cooldown_share, or final_lr=0",
        )
    if schedule.decay == "drops" and schedule.final_lr:
        yield "schedule.final_lr", f"has no effect on {decay}; set it to 0"

    if schedule.decay != "drops" and at:
        what = f"has no effect on {decay}"
        yield "schedule.drops_at", f"{what}; remove it, or set schedule.decay=drops"
    if schedule.decay == "drops" and not (
        at and list(at) == sorted(set(at)) and 0 < at[0] and at[-1] < 1
    ):
        what = f"{list(at)} are not increasing shares between 0 and 1"
        yield "schedule.drops_at", f"{what}; give some, for example [0.3, 0.6, 0.9]"


def learning_rate(
    step: int,
    schedule: ScheduleSettings,
    *,
    peak: float,
    total_steps: int,
    warmup_steps: int = 0,
    cooldown_steps: int = 0,
) -> float:
    """Learning rate of the update that takes the model from `step` to `step + 1`.

    Linear warm-up to `peak`, then the curve, which the last `cooldown_steps` multiply by a line;
    cosine, linear and any cool-down reach `final_lr` at `total_steps`. With `decay_from` "start"
    the rate falls at the end of the warm-up, by the curve's first part.
    Source: Dosovitskiy et al. 2021, appendix B.1; cool-down: Zhai et al. 2022 (Scaling Vision
    Transformers). In big_vision the first step of a warm-up has rate 0; here it has the rate of
    the second. Cosine from the start: timm's `CosineLRScheduler` (warmup_prefix=False), per step
    instead of per epoch. Drops: big_transfer, `bit_hyperrule.py`.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps

    start = warmup_steps
    if schedule.decay_from == "start" or schedule.decay == "drops":
        start = 0
    progress = (step - start) / max(1, total_steps - start)

    # A step beyond the end, as after a change of the schedule, keeps the last rate.
    share = SCHEDULES[schedule.decay](min(1.0, progress), schedule.drops_at)
    if cooldown_steps:
        share *= min(1.0, max(0.0, (total_steps - step) / cooldown_steps))
    return schedule.final_lr + (peak - schedule.final_lr) * share
