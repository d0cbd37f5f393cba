"""Compare runs: differing parameters; metrics at the end, at equal budgets, and at their best.

Leaves out: reading runs (`runs`), printing (`text`), the HTML report (`report`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from launch.comparison.budget import Budget, equal_budget, have_equal_length, value_at
from launch.comparison.runs import ComparedRun
from launch.comparison.seeds import SeedGroup, seed_groups

# Which direction is better, by the suffix of a metric's name.
BETTER = {
    "loss": "lower",
    "error": "lower",
    "data_wait": "lower",
    "top1": "higher",
    "top5": "higher",
    "accuracy": "higher",
    "images_per_s": "higher",
    "mfu": "higher",
}
# Parameters that differ because the runs do: where a run is, what it is called, what it is part of.
NAMES, TAGS = ("name", "output"), "tracking.tags"


def better_direction(key: str) -> str | None:
    """Which direction of a metric is better, higher or lower; None where that is not known."""
    name = key.rsplit("/", 1)[-1]
    return next((way for suffix, way in BETTER.items() if name.endswith(suffix)), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricLine:
    """One metric over all runs; None where a run lacks it.

    Deltas are against the first run, at the equal budget if there is one.
    """

    key: str
    better: str | None
    final: tuple[float | None, ...]
    best: tuple[float | None, ...]
    equal: tuple[float | None, ...] | None = None
    """At `Comparison.budget`; None without one."""

    @property
    def deltas(self) -> tuple[float | None, ...]:
        values = self.final if self.equal is None else self.equal
        first = values[0]
        return tuple(
            None if value is None or first is None or i == 0 else value - first
            for i, value in enumerate(values)
        )

    def change(self, delta: float | None) -> str | None:
        """better, worse or equal; None for an unknown direction or a delta that is not finite."""
        if delta is None or self.better is None or not math.isfinite(delta):
            return None
        if delta == 0:
            return "equal"
        return "better" if (delta > 0) == (self.better == "higher") else "worse"


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    runs: tuple[ComparedRun, ...]
    params: tuple[tuple[str, tuple[str | None, ...]], ...]
    """Parameters that differ between runs, without those that name a run; of a single run all."""
    num_equal_params: int
    metrics: tuple[MetricLine, ...]
    budget: Budget | None = None
    """Where metrics are compared; None: at the end of the runs, which are equally long."""
    seeds: tuple[SeedGroup, ...] = ()


def compare(
    runs: Sequence[ComparedRun], *, axis: str | None = None, total: float | None = None
) -> Comparison:
    """Compare runs. Of a single run, all parameters are listed.

    Metrics are compared at `total` of an axis (`progress.AXES`), by default at the largest that all
    runs have reached. Without an axis, runs of different lengths are compared at equal steps.
    Raises UserError if that is not possible.
    """
    if axis is None and not have_equal_length(runs):
        axis = "steps"
    budget = None if axis is None else equal_budget(runs, axis, total)
    keys = sorted({key for run in runs for key in run.params})
    rows = [(key, tuple(run.params.get(key) for run in runs)) for key in keys]
    differing = [row for row in rows if len(runs) == 1 or differ(*row)]
    metric_keys = sorted({key for run in runs for row in run.rows for key in row.metrics})
    return Comparison(
        runs=tuple(runs),
        params=tuple(differing),
        num_equal_params=sum(len(set(values)) == 1 for _, values in rows),
        metrics=tuple(_metric_line(key, runs, budget) for key in metric_keys),
        budget=budget,
        seeds=seed_groups(runs),
    )


def differ(key: str, values: Sequence[str | None]) -> bool:
    """Whether a parameter differs between runs, other than by naming them."""
    return len(set(values)) > 1 and not (key in NAMES or key.startswith(TAGS))


def _metric_line(key: str, runs: Sequence[ComparedRun], budget: Budget | None) -> MetricLine:
    better = better_direction(key)
    values = [run.series(key)[1] for run in runs]
    return MetricLine(
        key=key,
        better=better,
        final=tuple(column[-1] if column else None for column in values),
        best=tuple(_best(column, better) for column in values),
        equal=None
        if budget is None
        else tuple(value_at(run, key, step) for run, step in zip(runs, budget.steps, strict=True)),
    )


def _best(values: list[float], better: str | None) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    if better is None or not finite:
        return None
    return max(finite) if better == "higher" else min(finite)
