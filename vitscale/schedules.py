"""Learning-rate schedules: pure functions of the step.

Owns: the `schedule` group and its curves.
Leaves out: applying a rate to an optimiser (`engine`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from pydantic import Field

from vitscale.config.section import Section


class ScheduleSettings(Section):
    epochs: float | None = Field(default=None, gt=0)
    """Passes over the training split; give this or `steps`."""
    steps: int | None = Field(default=None, gt=0)
    """Optimiser steps; give this or `epochs`."""
    warmup_steps: int = Field(default=0, ge=0)
    """Linear rise from 0 to the peak."""
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    final_lr: float = Field(default=0.0, ge=0)
    """Learning rate at the last step."""


def linear(progress: float) -> float:
    return 1.0 - progress


def cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def constant(progress: float) -> float:
    return 1.0


# Share of (peak - final) left after a share `progress` in [0, 1] of the steps behind the warm-up.
DECAYS: dict[str, Callable[[float], float]] = {
    "cosine": cosine,
    "linear": linear,
    "constant": constant,
}


def learning_rate(
    step: int, *, peak: float, final: float, warmup_steps: int, total_steps: int, decay: str
) -> float:
    """Learning rate of the update that takes the model from `step` to `step + 1`.

    Linear warm-up to `peak` over `warmup_steps`, then `decay` to `final` at `total_steps`.
    Source: Dosovitskiy et al. 2021, appendix B.1.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return final + (peak - final) * DECAYS[decay](min(1.0, progress))
