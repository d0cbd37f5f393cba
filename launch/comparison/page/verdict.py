"""Say which run is best, by which metric, and in what it differs from the next one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from launch.comparison.differences import MetricLine
from launch.comparison.progress import Progress
from launch.comparison.runs import RunRecord

# The metric that decides: the first of these that the most runs have, then any of val, then loss.
PREFERRED = ("val/top1", "val/knn_top1", "val/linear_top1", "val/class_mean_top1", "val/loss")
LAST_RESORT = "train/loss"

# Settings that cannot change a result, or name the run, are left out of its reasons.
NO_REASON = ("name", "output", "tracking", "launch", "checkpoint", "deepspeed", "evaluate")
# The others are listed in this order of their first part.
REASON_ORDER = ("init", "stage", "model", "objective", "optim", "schedule", "data", "seed")
BUDGETS = ("samples", "steps")
SAME_BUDGET = 0.01


def verdict(
    lines: Sequence[MetricLine], runs: Sequence[RunRecord], progress: Sequence[Progress]
) -> dict[str, Any] | None:
    """The deciding metric, the runs from best to worst, and what differs; None for nothing.

    "headline": metrics to show beside it. "reasons": parameters that differ between any two runs,
    the likeliest causes first. "against_second": those that differ between the best two.
    "unequal_budget": samples or steps, if some runs were longer than others.
    """
    line = _deciding(lines)
    if line is None:
        return None
    sign = 1 if line.better == "lower" else -1
    ranked = sorted(
        (i for i, value in enumerate(line.final) if _known(value)),
        key=lambda i: (sign * (line.final[i] or 0.0), i),
    )
    first = runs[ranked[0]].params
    second = runs[ranked[1]].params if len(ranked) > 1 else first
    reasons = _reasons(runs)
    against_second = [key for key in reasons if first.get(key) != second.get(key)]
    reasons = list(dict.fromkeys([*against_second, *reasons]))
    return {
        "metric": line.key,
        "ranked": ranked,
        "headline": _headline(lines, line),
        "reasons": reasons,
        "against_second": against_second,
        "unequal_budget": _unequal_budget([progress[i] for i in ranked]),
    }


def _known(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _deciding(lines: Sequence[MetricLine]) -> MetricLine | None:
    def place(line: MetricLine) -> tuple[int, int, bool, str]:
        count = sum(map(_known, line.final))
        known = line.key in PREFERRED
        rank = PREFERRED.index(line.key) if known else len(PREFERRED)
        return -count, rank, line.better != "higher", line.key

    quality = [line for line in lines if line.better and any(map(_known, line.final))]
    evaluated = [line for line in quality if line.key.startswith("val/")]
    trained = [line for line in quality if line.key == LAST_RESORT]
    return min(evaluated or trained, key=place, default=None)


def _headline(lines: Sequence[MetricLine], deciding: MetricLine) -> list[str]:
    """The deciding metric and up to two others that say how good a run is."""
    others = [
        line.key
        for line in lines
        if line.key != deciding.key
        and line.better
        and (line.key.startswith("val/") or line.key == LAST_RESORT)
    ]
    wanted = [key for key in (*PREFERRED, LAST_RESORT) if key in others]
    return [deciding.key, *dict.fromkeys([*wanted, *others])][:3]


def _reasons(runs: Sequence[RunRecord]) -> list[str]:
    keys = {key for run in runs for key in run.params}
    differing = [key for key in keys if len({run.params.get(key) for run in runs}) > 1]
    order = {name: i for i, name in enumerate(REASON_ORDER)}

    def place(key: str) -> tuple[int, str]:
        return order.get(key.split(".")[0], len(order)), key

    return sorted((k for k in differing if k.split(".")[0] not in NO_REASON), key=place)


def _unequal_budget(progress: Sequence[Progress]) -> str | None:
    """The axis on which the runs have different lengths; None if they are as long as each other."""
    for axis in BUDGETS:
        totals = [each.at(axis, each.steps[-1]) for each in progress]
        known = [total for total in totals if total is not None]
        if len(known) == len(totals):
            return axis if min(known) < (1 - SAME_BUDGET) * max(known) else None
    return None
