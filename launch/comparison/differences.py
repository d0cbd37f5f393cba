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
from vitscale.config.changes import changed_settings, with_effect
from vitscale.config.errors import UserError
from vitscale.evaluation.main_metric import direction, preference

# The metric that decides where no run was evaluated.
LAST_RESORT = "train/loss"
# The place of a run in a chain: the chain's name, the stage, and the keys of its sweeps and of its
# inputs' sweeps.
CHAIN_TAG = "tracking.tags.chain"
# Of a path such as runs/pretrain_seed0, in which repetitions differ, too.
SEED = re.compile(r"seed[-_=]?\d+")
BUDGET = re.compile(
    rf"({'|'.join(AXES)})(?:=((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?))?", re.IGNORECASE
)
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
        return None, *(
            None if v is None or first is None else v - first for v in others
        )

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
            return -len(_finite(line.equal)), *preference(line.key)

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
    trainings = [run for run in runs if not run.is_evaluation]
    if axis is not None:
        runs = trainings or runs
    elif len({run.steps[-1] for run in trainings}) > 1:
        axis = "steps"
    budget = None if axis is None else _equal_budget(runs, axis, total)

    keys = sorted({key for run in runs for key in with_effect(run.params, "table")})
    differing = keys if len(runs) == 1 else sorted(_differing(runs))
    metric_keys = sorted(
        {key for run in runs for row in run.rows for key in row.metrics}
    )
    return Comparison(
        runs=tuple(runs),
        params=tuple(
            (key, tuple(run.params.get(key) for run in runs)) for key in differing
        ),
        num_equal_params=len(keys) - len(differing),
        metrics=tuple(_metric_line(key, runs, budget) for key in metric_keys),
        budget=budget,
        seeds=seed_groups(runs),
    )


def _differing(runs: Sequence[ComparedRun]) -> set[str]:
    """Settings that runs differ in; evaluations and trainings lack settings of each other."""
    differing: set[str] = set()
    first_of_kind: dict[bool, ComparedRun] = {}
    for run in runs:
        first = first_of_kind.setdefault(run.is_evaluation, run)
        differing |= changed_settings(first.params, run.params, purpose="table").keys()

    trained, evaluated = (
        first_of_kind.get(kind, runs[0]).params for kind in (False, True)
    )
    changed = changed_settings(trained, evaluated, purpose="table")
    return differing | (changed.keys() & trained.keys() & evaluated.keys())


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


def _equal_budget(
    runs: Sequence[ComparedRun], axis: str, total: float | None
) -> Budget:
    """The total of `axis` that all runs have reached, or the one given. Raises UserError."""
    for run in runs:
        if axis not in run.totals:
            raise UserError(
                f"the {axis} of run {run.label} are not known",
                where="--at",
                allowed="samples need data.global_batch; FLOPs need the run folder",
                next_step="compare at another budget, for example --at steps",
            )
    trainings = [run for run in runs if not run.is_evaluation] or runs
    shortest = min(run.totals[axis][-1] for run in trainings)
    if total is not None and total > shortest * (1 + SAME):
        raise UserError(
            f"not all runs have reached {total:,.5g} {axis}",
            where="--at",
            allowed=f"at most {shortest:,.5g}",
        )
    chosen = shortest if total is None else total
    # A total that went through division may end a little below.
    limit = chosen * (1 + 1e-9)
    steps = tuple(
        # An evaluation spends nothing: its results count at any budget.
        run.steps[-1]
        if run.is_evaluation
        else _last(run.steps, run.totals[axis], limit)
        for run in runs
    )
    return Budget(axis=axis, total=chosen, steps=steps)


def _last(values: Sequence[Any], places: Sequence[float], limit: float) -> Any:
    """The last value whose place is not after the limit; None if all are."""
    found = bisect_right(places, limit)
    return values[found - 1] if found else None


def _metric_line(
    key: str, runs: Sequence[ComparedRun], budget: Budget | None
) -> MetricLine:
    better = direction(key)
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
        best=tuple(
            pick(_finite(values), default=None) if better else None
            for _, values in series
        ),
        equal=equal,
    )


def _finite(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


# ---- seeds and varied numbers -----------------------------------------------------------------


def varied_settings(runs: Sequence[ComparedRun]) -> list[dict[str, str]]:
    """What each run may owe its result to, apart from its seed.

    Of a run in a chain its place in it, and the settings in which runs at this place differ: all
    others follow from the place.
    """
    places = [_place_in_chain(run) for run in runs]
    settings = [
        {
            key: SEED.sub("seed", text)
            for key, text in with_effect(run.params, "result").items()
            if not _is_seed(key)
        }
        for run in runs
    ]

    # Texts of each setting at each place.
    known: dict[tuple[Any, str], set[str | None]] = {}
    keys = {key for each in settings for key in each}
    for place, each in zip(places, settings, strict=True):
        for key in keys:
            known.setdefault((tuple(place.items()), key), set()).add(each.get(key))

    return [
        place
        | {k: v for k, v in each.items() if len(known[tuple(place.items()), k]) > 1}
        for place, each in zip(places, settings, strict=True)
    ]


def _place_in_chain(run: ComparedRun) -> dict[str, str]:
    """The name of the chain, the stage, and the values of the sweeps; empty without a chain."""
    return {
        key.removeprefix(CHAIN_TAG).removeprefix(".") or "chain": text
        for key, text in sorted(run.params.items())
        if f"{key}.".startswith(f"{CHAIN_TAG}.") and not _is_seed(key)
    }


def _is_seed(key: str) -> bool:
    return key.rpartition(".")[2] == "seed"


def _seeds_of(run: ComparedRun) -> tuple[tuple[str, str], ...]:
    """The seeds of a run and, in a chain, of the runs before it."""
    return tuple(
        (key, text)
        for key, text in sorted(run.params.items())
        if key == "seed" or (key.startswith(f"{CHAIN_TAG}.") and _is_seed(key))
    )


def seed_groups(runs: Sequence[ComparedRun]) -> dict[str, tuple[int, ...]]:
    """Group runs that differ in the seed alone, in the order of their first run."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, (run, settings) in enumerate(zip(runs, varied_settings(runs), strict=True)):
        if _seeds_of(run):
            groups.setdefault(tuple(sorted(settings.items())), []).append(i)
    return {
        f"{runs[members[0]].label} and {len(members) - 1} more": tuple(members)
        for members in groups.values()
        if len({_seeds_of(runs[i]) for i in members}) > 1
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
    settings = varied_settings(comparison.runs)
    keys = sorted({key for each in settings for key in each})
    keys = [key for key in keys if len({each.get(key) for each in settings}) > 1]
    found = []
    for key in keys:
        groups: dict[str, dict[float, list[float]]] = {}
        for each, value in zip(settings, line.final, strict=True):
            number = _number(each.get(key))
            if number is not None and value is not None and math.isfinite(value):
                others = ", ".join(
                    f"{k}={each[k]}" for k in keys if k != key and k in each
                )
                groups.setdefault(others, {}).setdefault(number, []).append(value)
        series = {
            others: tuple(
                (n, over) for n in sorted(points) if (over := spread(points[n]))
            )
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
