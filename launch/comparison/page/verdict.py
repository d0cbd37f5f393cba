"""Say which run is best, by which metric, and in what it differs from the next one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from launch.comparison.differences import Comparison, MetricLine
from launch.comparison.progress import Progress
from launch.comparison.runs import ComparedRun
from launch.comparison.seeds import spread

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
    lines: Sequence[MetricLine], comparison: Comparison, progress: Sequence[Progress]
) -> dict[str, Any] | None:
    """The deciding metric, the runs from best to worst, and what differs; None for nothing.

    "sides": the best two, which are means over seeds where two groups of runs have several.
    "headline": metrics to show beside it. "reasons": parameters that differ between any two runs,
    the likeliest causes first. "against_second": those that differ between the best two.
    "unequal": samples or steps, if the values compared were reached with different numbers of them.
    "seed_deviation": the largest standard deviation of the deciding metric over seeds.
    """
    line = _deciding(lines)
    if line is None:
        return None
    runs, values = comparison.runs, values_compared(line)
    sign = 1 if line.better == "lower" else -1
    ranked = sorted(
        (i for i, value in enumerate(values) if _known(value)),
        key=lambda i: (sign * (values[i] or 0.0), i),
    )
    sides = _groups(line, comparison) or [
        {"label": runs[i].label, "run": i, "value": values[i], "seeds": 1, "deviation": None}
        for i in ranked
    ]
    pair = [runs[side["run"]].params for side in sides[:2]]
    reasons = _reasons(runs)
    against_second = [key for key in reasons if pair[0].get(key) != pair[-1].get(key)]
    if sides[0]["seeds"] > 1:
        against_second = [key for key in against_second if key != "seed"]
    return {
        "metric": line.key,
        "ranked": ranked,
        "sides": sides[:2],
        "headline": _headline(lines, line),
        "reasons": list(dict.fromkeys([*against_second, *reasons])),
        "against_second": against_second,
        "unequal": _unequal([progress[i] for i in ranked], _steps(comparison, ranked)),
        "seed_deviation": _seed_deviation(line, comparison),
    }


def _groups(line: MetricLine, comparison: Comparison) -> list[dict[str, Any]]:
    """Means over seeds from best to worst; empty with fewer than two groups."""
    values = values_compared(line)
    found: list[dict[str, Any]] = []
    for group in comparison.seeds:
        over_seeds = spread([values[i] for i in group.members])
        if over_seeds is not None:
            found.append(
                {
                    "label": group.label,
                    "run": group.members[0],
                    "value": over_seeds.mean,
                    "seeds": over_seeds.count,
                    "deviation": over_seeds.deviation,
                }
            )
    found.sort(key=lambda side: side["value"], reverse=line.better == "higher")
    return found if len(found) > 1 else []


def _seed_deviation(line: MetricLine, comparison: Comparison) -> float | None:
    values = values_compared(line)
    spreads = [spread([values[i] for i in group.members]) for group in comparison.seeds]
    return max((each.deviation for each in spreads if each), default=None)


def values_compared(line: MetricLine) -> tuple[float | None, ...]:
    """The values at equal budgets, or the last ones of runs that are equally long."""
    return line.final if line.equal is None else line.equal


def _steps(comparison: Comparison, ranked: Sequence[int]) -> list[int]:
    """The steps whose values are compared."""
    if comparison.budget is None:
        return [comparison.runs[i].last_step for i in ranked]
    return [comparison.budget.steps[i] or 0 for i in ranked]


def _known(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _deciding(lines: Sequence[MetricLine]) -> MetricLine | None:
    def place(line: MetricLine) -> tuple[int, int, bool, str]:
        count = sum(map(_known, values_compared(line)))
        known = line.key in PREFERRED
        rank = PREFERRED.index(line.key) if known else len(PREFERRED)
        return -count, rank, line.better != "higher", line.key

    quality = [line for line in lines if line.better and any(map(_known, values_compared(line)))]
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


def _reasons(runs: Sequence[ComparedRun]) -> list[str]:
    keys = {key for run in runs for key in run.params}
    differing = [key for key in keys if len({run.params.get(key) for run in runs}) > 1]
    order = {name: i for i, name in enumerate(REASON_ORDER)}

    def place(key: str) -> tuple[int, str]:
        return order.get(key.split(".")[0], len(order)), key

    return sorted((k for k in differing if k.split(".")[0] not in NO_REASON), key=place)


def _unequal(progress: Sequence[Progress], steps: Sequence[int]) -> str | None:
    """What the runs have spent different amounts of at these steps; None for nothing."""
    for axis in BUDGETS:
        totals = [each.at(axis, step) for each, step in zip(progress, steps, strict=True)]
        known = [total for total in totals if total is not None]
        if len(known) == len(totals):
            return axis if min(known) < (1 - SAME_BUDGET) * max(known) else None
    return None
