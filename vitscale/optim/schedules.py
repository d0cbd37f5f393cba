"""Learning-rate schedules: pure functions of the step.

Owns: the `schedule` group, its curves and which of its settings go together.
Leaves out: applying a rate to an optimiser (`engine`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from vitscale.config.section import Section

# Share of (peak - final) left after a share `progress` in [0, 1] of the curve's steps, which begin
# at `decay_from`.
SCHEDULES: dict[str, Callable[[float, tuple[float, ...]], float]] = {
    "cosine": lambda progress, drops_at: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "linear": lambda progress, drops_at: 1.0 - progress,
    "constant": lambda progress, drops_at: 1.0,
    "drops": lambda progress, drops_at: 0.1 ** sum(progress >= drop for drop in drops_at),
}

if TYPE_CHECKING:
    ScheduleName = str
else:
    ScheduleName = Literal[tuple(SCHEDULES)]


class ScheduleSettings(Section):
    """Length of the run and learning rate over its steps."""

    epochs: float | None = Field(default=None, gt=0)
    """Passes over the training split; give this or `steps`."""
    steps: int | None = Field(default=None, gt=0)
    """Optimiser steps; give this or `epochs`."""
    warmup_steps: int = Field(default=0, ge=0)
    """Linear rise from 0 to the peak."""
    warmup_epochs: float = Field(default=0.0, ge=0)
    """The same in passes over the training split (DeiT, MAE); give at most one of the two."""
    decay: ScheduleName = "cosine"
    """Curve after the warm-up. drops: divided by 10 at each of `drops_at` (BiT)."""
    drops_at: tuple[float, ...] = Field(default=(), strict=False)
    """drops only: shares of all steps, warm-up included, in increasing order."""
    decay_from: Literal["start", "warmup_end"] = "warmup_end"
    """cosine and linear only. start: the curve begins at step 0 and the warm-up replaces its first
    part, as in timm and DeiT. warmup_end: it begins after the warm-up, as in ViT, AugReg, MAE."""
    final_lr: float = Field(default=0.0, ge=0)
    """Learning rate at the last step."""
    cooldown_share: float = Field(default=0.0, ge=0, lt=1)
    """constant only: the last share of all steps, which brings the rate to `final_lr` linearly."""


def schedule_problems(schedule: ScheduleSettings) -> Iterator[tuple[str, str]]:
    """Combinations in which a setting could have no effect."""
    decay, at = f"schedule.decay={schedule.decay}", schedule.drops_at
    if schedule.warmup_steps and schedule.warmup_epochs:
        yield ("schedule.warmup_epochs", "and warmup_steps exclude each other; set one to 0")
    if schedule.decay != "constant" and schedule.cooldown_share:
        what = f"{decay} ends at final_lr by itself"
        yield ("schedule.cooldown_share", f"{what}; set it to 0, or schedule.decay=constant")
    if schedule.decay in ("constant", "drops") and schedule.decay_from != "warmup_end":
        yield ("schedule.decay_from", f"has no effect on {decay}; set it to warmup_end")
    if schedule.decay == "constant" and schedule.final_lr and not schedule.cooldown_share:
        what = f"constant never reaches {schedule.final_lr}"
        yield ("schedule.final_lr", f"{what}; set schedule.cooldown_share, or final_lr=0")
    if schedule.decay == "drops" and schedule.final_lr:
        yield ("schedule.final_lr", f"has no effect on {decay}; set it to 0")
    if schedule.decay != "drops" and at:
        what = f"has no effect on {decay}"
        yield ("schedule.drops_at", f"{what}; remove it, or set schedule.decay=drops")
    if schedule.decay == "drops" and not (
        at and list(at) == sorted(set(at)) and 0 < at[0] and at[-1] < 1
    ):
        what = f"{list(at)} are not increasing shares between 0 and 1"
        yield ("schedule.drops_at", f"{what}; give some, for example [0.3, 0.6, 0.9]")


def warmup_steps(schedule: ScheduleSettings, *, num_samples: int, global_batch: int) -> int:
    """Steps of the warm-up, given in steps or in epochs."""
    return schedule.warmup_steps or int(schedule.warmup_epochs * num_samples) // global_batch


def cooldown_steps(share: float, *, total_steps: int) -> int:
    """Steps of the cool-down; at least one where there is any."""
    return max(1, round(share * total_steps)) if share else 0


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
    start = 0 if schedule.decay_from == "start" or schedule.decay == "drops" else warmup_steps
    progress = (step - start) / max(1, total_steps - start)
    share = SCHEDULES[schedule.decay](min(1.0, progress), schedule.drops_at)
    if cooldown_steps:
        share *= min(1.0, max(0.0, (total_steps - step) / cooldown_steps))
    return schedule.final_lr + (peak - schedule.final_lr) * share
