"""Compare runs: differing settings; metrics at the end, at equal budgets, at best, by seed."""

from __future__ import annotations

import math
import re
import statistics
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from launch.comparison.runs import AXES, ComparedRun
from vitscale.config.errors import UserError

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
# The metric that decides: the first of these that the most runs have, then any of val, then loss.
PREFERRED = ("val/top1", "val/knn_top1", "val/linear_top1", "val/class_mean_top1", "val/loss")
LAST_RESORT = "train/loss"
# Parameters that differ because the runs do: where a run is, what it is called, what it is part of.
NAMES, TAGS = ("name", "output"), "tracking.tags"
# Settings that change where and how fast a run is made, not its result.
WITHOUT_EFFECT = (
    *(*NAMES, "tracking", "launch", "checkpoint"),
    *("data.num_workers", "data.remote", "data.planned_num_samples"),
    *("engine.num_threads", "engine.timeout_min", "engine.max_micro_batch", "engine.profile_steps"),
    # Of a data preparation.
    *("num_workers", "source.path"),
)
# The place of a run in a chain: its stage, and the keys of its sweeps and of its inputs' sweeps.
CHAIN_TAGS = "tracking.tags.chain."
# Of a path such as runs/pretrain_seed0, in which repetitions differ, too.
SEED = re.compile(r"seed[-_=]?\d+")
BUDGET = re.compile(rf"({'|'.join(AXES)})(?:=((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?))?", re.IGNORECASE)
# Relative difference below which two runs are as long as each other.
SAME = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """A point to compare at: the total of an axis, and the last logged step of each run there."""

    axis: str
    total: float
    steps: tuple[int | None, ...]
    """None for a run that had logged nothing yet."""

    @property
    def title(self) -> str:
        return f"at {self.total:,.5g} {self.axis}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Mean and sample standard deviation over seeds; of a single run, no deviation."""

    mean: float
    deviation: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricLine:
    """One metric over all runs; None where a run lacks it."""

    key: str
    better: str | None
    """higher or lower; None where that is not known."""
    final: tuple[float | None, ...]
    best: tuple[float | None, ...]
    equal: tuple[float | None, ...]
    """At `Comparison.budget`; without one, the last values of runs that are equally long."""

    @property
    def deltas(self) -> tuple[float | None, ...]:
        """Differences to the first run."""
        first, *others = self.equal
        return None, *(None if v is None or first is None else v - first for v in others)

    def change(self, delta: float | None) -> str | None:
        """better, worse or equal; None for an unknown direction or a delta that is not finite."""
        if delta is None or self.better is None or not math.isfinite(delta):
            return None
        if delta == 0:
            return "equal"
        return "better" if (delta > 0) == (self.better == "higher") else "worse"


@dataclass(frozen=True, kw_only=True, slots=True)
class Dependence:
    """The deciding metric at the end of the runs, over a number that they differ in."""

    key: str
    metric: str
    series: dict[str, tuple[tuple[float, Spread], ...]]
    """Other differing settings -> (number, metric over seeds), in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    runs: tuple[ComparedRun, ...]
    params: tuple[tuple[str, tuple[str | None, ...]], ...]
    """Parameters that differ between runs, without those that name a run; of a single run all."""
    num_equal_params: int
    metrics: tuple[MetricLine, ...]
    budget: Budget | None
    """Point of comparison; None: the end of the runs, which are equally long."""
    seeds: dict[str, tuple[int, ...]]
    """Runs of equal settings with different seeds: name of the group -> places in `runs`."""

    @property
    def deciding(self) -> MetricLine | None:
        """The metric that says which run is best."""

        def place(line: MetricLine) -> tuple[int, int, bool, str]:
            rank = PREFERRED.index(line.key) if line.key in PREFERRED else len(PREFERRED)
            return -len(_finite(line.equal)), rank, line.better != "higher", line.key

        known = [line for line in self.metrics if line.better and _finite(line.equal)]
        evaluated = [line for line in known if line.key.startswith("val/")]
        trained = [line for line in known if line.key == LAST_RESORT]
        return min(evaluated or trained, key=place, default=None)


def compare(
    runs: Sequence[ComparedRun], *, axis: str | None = None, total: float | None = None
) -> Comparison:
    """Compare runs. Of a single run, all parameters are listed.

    Metrics are compared at `total` of an axis (`AXES`), by default at the largest that all runs
    have reached; evaluations, which spend nothing, are left out. Without an axis, runs of different
    lengths are compared at equal steps. Raises UserError if that is not possible.
    """
    if axis is not None:
        runs = [run for run in runs if not run.is_evaluation] or runs
    elif len({run.steps[-1] for run in runs}) > 1:
        axis = "steps"
    budget = None if axis is None else _equal_budget(runs, axis, total)
    keys = sorted({key for run in runs for key in run.params})
    differing = [key for key in keys if len(runs) == 1 or _differs(key, runs)]
    metric_keys = sorted({key for run in runs for row in run.rows for key in row.metrics})
    return Comparison(
        runs=tuple(runs),
        params=tuple(
            (key, tuple(run.params.get(key) for run in runs))
            for key in differing
            if len(runs) == 1 or (key not in NAMES and not key.startswith(TAGS))
        ),
        num_equal_params=len(keys) - len(differing),
        metrics=tuple(_metric_line(key, runs, budget) for key in metric_keys),
        budget=budget,
        seeds=seed_groups(runs),
    )


def _differs(key: str, runs: Sequence[ComparedRun]) -> bool:
    """Whether runs differ in a setting; evaluations and trainings lack settings of each other."""
    kinds = {run.is_evaluation for run in runs if key in run.params}
    return len({run.params.get(key) for run in runs if run.is_evaluation in kinds}) > 1


def parse_budget(text: str) -> tuple[str, float | None]:
    """Read AXIS or AXIS=TOTAL, as `--at` has it. Raises UserError."""
    found = BUDGET.fullmatch(text)
    total = None if found is None or found[2] is None else float(found[2])
    if found is None or total == 0 or (total is not None and not math.isfinite(total)):
        raise UserError(
            f"{text!r} is not a budget",
            where="--at",
            allowed=f"one of {', '.join(AXES)}, or with a total: steps=10000, samples=1e6",
        )
    return found[1].lower(), total


def _equal_budget(runs: Sequence[ComparedRun], axis: str, total: float | None) -> Budget:
    """The total of `axis` that all runs have reached, or the one given. Raises UserError."""
    for run in runs:
        if axis not in run.totals:
            raise UserError(
                f"the {axis} of run {run.label} are not known",
                where="--at",
                allowed="samples need data.global_batch; FLOPs need the run folder",
                next_step="compare at another budget, for example --at steps",
            )
    shortest = min(run.totals[axis][-1] for run in runs)
    if total is not None and total > shortest * (1 + SAME):
        raise UserError(
            f"not all runs have reached {total:,.5g} {axis}",
            where="--at",
            allowed=f"at most {shortest:,.5g}",
        )
    chosen = shortest if total is None else total
    # A total that went through division may end a little below.
    steps = (_last(run.steps, run.totals[axis], chosen * (1 + 1e-9)) for run in runs)
    return Budget(axis=axis, total=chosen, steps=tuple(steps))


def _last(values: Sequence[Any], places: Sequence[float], limit: float) -> Any:
    """The last value whose place is not after the limit; None if all are."""
    found = bisect_right(places, limit)
    return values[found - 1] if found else None


def _metric_line(key: str, runs: Sequence[ComparedRun], budget: Budget | None) -> MetricLine:
    name = key.rsplit("/", 1)[-1]
    better = next((way for suffix, way in BETTER.items() if name.endswith(suffix)), None)
    series = [run.series(key) for run in runs]
    pick = max if better == "higher" else min
    final = tuple(values[-1] if values else None for _, values in series)
    equal = final
    if budget is not None:
        equal = tuple(
            None if step is None else _last(values, steps, step)
            for (steps, values), step in zip(series, budget.steps, strict=True)
        )
    return MetricLine(
        key=key,
        better=better,
        final=final,
        best=tuple(pick(_finite(values), default=None) if better else None for _, values in series),
        equal=equal,
    )


def _finite(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


# ---- seeds and varied numbers -----------------------------------------------------------------


def settings_of(run: ComparedRun) -> dict[str, str]:
    """Settings of a run without its seed: its place in a chain, else its parameters."""
    chain = {
        key.removeprefix(CHAIN_TAGS): value
        for key, value in run.params.items()
        if key.startswith(CHAIN_TAGS)
    }
    settings = chain or {k: v for k, v in run.params.items() if has_effect(k)}
    return {
        key: SEED.sub("seed", value)
        for key, value in settings.items()
        if key.rpartition(".")[2] != "seed"
    }


def has_effect(key: str) -> bool:
    """Return True if a parameter can change a result."""
    return not any(key == each or key.startswith(f"{each}.") for each in WITHOUT_EFFECT)


def seed_groups(runs: Sequence[ComparedRun]) -> dict[str, tuple[int, ...]]:
    """Group runs that differ in the seed alone, in the order of their first run."""
    groups: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for i, run in enumerate(runs):
        if "seed" in run.params:
            groups.setdefault(tuple(sorted(settings_of(run).items())), []).append(i)
    return {
        f"{runs[members[0]].label} and {len(members) - 1} more": tuple(members)
        for members in groups.values()
        if len({runs[i].params["seed"] for i in members}) > 1
    }


def spread(values: Iterable[float | None]) -> Spread | None:
    """Spread of the finite values; None without any."""
    known = _finite(values)
    if not known:
        return None
    deviation = statistics.stdev(known) if len(known) > 1 else None
    return Spread(mean=statistics.fmean(known), deviation=deviation)


def dependences(comparison: Comparison) -> list[Dependence]:
    """Find numbers that vary among runs which otherwise differ in their seeds alone."""
    line = comparison.deciding
    if line is None:
        return []
    settings = [settings_of(run) for run in comparison.runs]
    keys = sorted({key for each in settings for key in each})
    keys = [key for key in keys if len({each.get(key) for each in settings}) > 1]
    found = []
    for key in keys:
        groups: dict[str, dict[float, list[float]]] = {}
        for each, value in zip(settings, line.final, strict=True):
            number = _number(each.get(key))
            if number is not None and value is not None and math.isfinite(value):
                others = ", ".join(f"{k}={each[k]}" for k in keys if k != key and k in each)
                groups.setdefault(others, {}).setdefault(number, []).append(value)
        series = {
            others: tuple((n, over) for n in sorted(points) if (over := spread(points[n])))
            for others, points in groups.items()
        }
        if any(len(points) > 1 for points in series.values()):
            found.append(Dependence(key=key, metric=line.key, series=series))
    return found


def _number(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if math.isfinite(number) else None
