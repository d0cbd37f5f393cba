"""What the figures of a run say of its health.

Owns: when a loss counts as a spike, and the names of the samples in a place of training.
Leaves out: measuring (`speed`), leaving out updates (`engine`), deciding to stop (`training_loop`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from vitscale.data.index_keys import sample_names
from vitscale.data.training_set import TrainingSet
from vitscale.runs.training import TrainingPlan

NUM_REMEMBERED = 20
MIN_REMEMBERED = 8
# A normal deviation is 1.4826 times the median absolute deviation. Eight of them, and at least a
# fifth of the loss itself, which a quiet plateau would otherwise exceed by nothing.
SPIKE_DEVIATIONS, SPIKE_SHARE = 8 * 1.4826, 0.2
NAMES_SHOWN = 8


@dataclass(kw_only=True)
class LossSpikeDetector:
    """Compares the loss of a log interval with those before it."""

    recent: list[float] = field(default_factory=list)
    num_spikes: int = 0

    def look(self, loss: float) -> str | None:
        """A sentence when `loss` lies far above the recent ones. Spikes are not remembered."""
        if not math.isfinite(loss):
            return None
        if len(self.recent) >= MIN_REMEMBERED:
            usual = median(self.recent)
            spread = median(abs(value - usual) for value in self.recent)
            if loss - usual > max(SPIKE_DEVIATIONS * spread, SPIKE_SHARE * abs(usual)):
                self.num_spikes += 1
                return (
                    f"loss spike: {loss:.4g}, where the median of the last {len(self.recent)} log "
                    f"intervals is {usual:.4g}"
                )
        self.recent = [*self.recent, loss][-NUM_REMEMBERED:]
        return None

    def state(self) -> dict[str, Any]:
        """JSON values."""
        return {"recent": list(self.recent), "num_spikes": self.num_spikes}

    def load_state(self, state: dict[str, Any]) -> None:
        self.recent, self.num_spikes = list(state["recent"]), int(state["num_spikes"])


def positions_of_step(
    plan: TrainingPlan, *, step: int, micro_steps: dict[int, tuple[int, ...]]
) -> list[int]:
    """Positions in training of some micro-batches of a step, or of all when none is given.

    step: counted from 1. micro_steps: rank -> micro-steps.
    """
    start, share = (step - 1) * plan.global_batch, plan.micro_batch
    found = []
    for rank, numbers in micro_steps.items():
        for number in numbers:
            first = start + (number * plan.world_size + rank) * share
            found += list(range(first, first + share))
    return found or list(range(start, start + plan.global_batch))


def names_at(data: TrainingSet, positions: Iterable[int]) -> str:
    """Keys of the samples there; of many only the first."""
    draws = [data.order.at(position) for position in positions]
    shown = sample_names(data.parts, [(draw.part, draw.sample) for draw in draws[:NAMES_SHOWN]])
    more = f" and {len(draws) - NAMES_SHOWN} more" if len(draws) > NAMES_SHOWN else ""
    return ", ".join(shown) + more
