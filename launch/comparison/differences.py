"""Compare runs: differing settings; metrics at the end, at equal budgets, at best, by seed.

Leaves out: which run is better (`verdict`), and how it is shown (`report`, `page`).
"""

from __future__ import annotations

import math
import re
import statistics
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from launch.comparison.runs import AXES, ComparedRun
from vitscale.config.changes import changed_settings, with_effect
from vitscale.config.errors import UserError
from vitscale.evaluation.main_metric import direction, preference
from vitscale.tracking.mlflow_sync import FOLDER_TAG

# The metric that decides where no run was evaluated.
LAST_RESORT = "train/loss"
# The place of a run in a chain: the chain's name, the stage, and the keys of its sweeps and of its
# inputs' sweeps.
CHAIN_TAG = "tracking.tags.chain"
# A checkpoint in the folder of a run, or a step of it, whose state a branch has taken.
CHECKPOINT = re.compile(r"/checkpoints/[^/]+/?$|@\d+$")
# Of a path such as runs/pretrain_seed0, in which repetitions differ, too.
SEED = re.compile(r"seed[-_=]?\d+")
BUDGET = re.compile(
    rf"({'|'.join(AXES)})(?:=((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?))?", re.IGNORECASE
)
# Relative difference below which two runs are as long as each other.
SAME = 1e-3
# A total that went through division may be off by so much.
ROUNDING = 1e-9
# What people change first comes first: keys, or groups of keys.
IMPORTANT = """
    init. model.name. model.preset. model.image_size. model.patch_size. model.width. model.depth.
    model. objective. data.path. data.train_split. data.first_percent. data. optim.name. optim.lr.
    optim. schedule. engine.precision. engine. seed.
""".split()


class Budget(NamedTuple):
    """A point to compare at: the total of an axis, which all trainings have reached."""

    axis: str
    total: float


@dataclass(frozen=True, slots=True)
class Point:
    """A value of a metric, and its step; of an interpolated value the steps on both sides."""

    value: float
    steps: tuple[int, ...]
    """Empty where a run has no such value, which is NaN then."""

    @property
    def place(self) -> str:
        return f"step {' to '.join(f'{step:,}' for step in self.steps)}"


NOTHING = Point(math.nan, ())
Points = tuple[Point, ...]
Pairs = tuple[tuple[str, str], ...]
"""Keys with their texts, of one run."""


class Spread(NamedTuple):
    """Mean and sample standard deviation over seeds; of a single run, no deviation."""

    mean: float
    deviation: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricLine:
    """One metric over all runs."""

    key: str
    better: str | None
    """higher or lower; None where that is not known."""
    final: Points
    """The last values."""
    best: Points
    equal: Points
    """At `Comparison.budget`, interpolated between logged values; without a budget, the last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    runs: tuple[ComparedRun, ...]
    params: tuple[tuple[str, tuple[str | None, ...]], ...]
    """Parameters that differ between runs, without those that name a run; of a single run all. The
    important ones are first."""
    num_equal_params: int
    metrics: tuple[MetricLine, ...]
    budget: Budget | None
    """Where runs are compared at equal cost; None: they are equally long."""
    is_asked: bool
    """Whether the user named the budget: then it decides, and not the ends of the runs."""
    seeds: dict[str, tuple[int, ...]]
    """Runs of equal settings with different seeds: name of the group -> places in `runs`."""
    origins: tuple[int, ...]
    """Of each run the place of the one that it started from; -1: none that is compared."""
    rivals: frozenset[int]
    """The places of the runs that are ranked: trainings that no other one started from, since a
    pre-training and its fine-tuning are steps of one way. Without any, evaluations."""

    def decisive(self, line: MetricLine) -> Points:
        """The values of a metric that decide which run is better."""
        if self.is_asked:
            return line.equal
        return line.final

    @property
    def deciding(self) -> MetricLine | None:
        """The metric that says which run is best."""

        known = [
            line for line in self.metrics if line.better and finite(self.decisive(line))
        ]
        evaluated = [line for line in known if line.key.startswith("val/")]
        trained = [line for line in known if line.key == LAST_RESORT]
        return min(
            evaluated or trained,
            key=lambda line: (
                -len(finite(self.decisive(line))),
                preference(line.key),
            ),
            default=None,
        )


def compare(
    runs: Sequence[ComparedRun], *, axis: str | None = None, total: float | None = None
) -> Comparison:
    """Compare runs. Of a single run, all parameters are listed.

    Metrics are also compared at `total` of an axis (`AXES`), by default at the largest that all
    runs have reached; evaluations, which spend nothing, are left out. Without an axis, rivals of
    different lengths are compared at equal steps, too. Raises UserError if that is not possible.
    """
    is_asked = axis is not None
    trainings = [run for run in runs if not run.is_evaluation]
    if is_asked:
        runs = trainings or runs

    # A run that another one began with is no rival of it.
    origins = [_origin(run, runs) for run in runs]
    used = {
        origin
        for run, origin in zip(runs, origins, strict=True)
        if not run.is_evaluation
    }
    rivals = {
        place
        for place, run in enumerate(runs)
        if place not in used and run.is_evaluation == (not trainings)
    }

    # A longer training is better for that reason alone, so equal steps are compared, too.
    lengths = {runs[place].steps[-1] for place in rivals}
    if axis is None and trainings and len(lengths) > 1:
        axis = "steps"
    budget = None
    if axis is not None:
        budget = _equal_budget(trainings or runs, axis, total)

    # Of a single run nothing differs, so all that it was made with is shown.
    keys = {key for run in runs for key in with_effect(run.params, "table")}
    differing = keys
    if len(runs) > 1:
        differing = _differing(runs)

    metric_keys = {key for run in runs for row in run.rows for key in row.metrics}
    return Comparison(
        runs=tuple(runs),
        params=tuple(
            (key, tuple(run.params.get(key) for run in runs))
            for key in sorted(differing, key=importance)
        ),
        num_equal_params=len(keys) - len(differing),
        metrics=tuple(_metric_line(key, runs, budget) for key in sorted(metric_keys)),
        budget=budget,
        is_asked=is_asked,
        seeds=seed_groups(runs),
        origins=tuple(origins),
        rivals=frozenset(rivals),
    )


def importance(key: str) -> tuple[int, str]:
    """Sort key of a setting: what people change first comes first."""
    places = (
        place for place, start in enumerate(IMPORTANT) if f"{key}.".startswith(start)
    )
    return next(places, len(IMPORTANT)), key


def _origin(run: ComparedRun, runs: Sequence[ComparedRun]) -> int:
    """The place of the run that `init` names, by its folder or by a checkpoint in it; else -1."""
    # The path was relative to the folder that the training was started in.
    init = CHECKPOINT.sub("", run.params.get("init", "")).strip("./")
    for place, other in enumerate(runs):
        folder = other.tags.get(FOLDER_TAG, "")
        if init and other is not run and folder.endswith(f"/{init}"):
            return place
    return -1


def _differing(runs: Sequence[ComparedRun]) -> set[str]:
    """Settings that runs differ in; evaluations and trainings lack settings of each other."""
    differing: set[str] = set()
    first_of_kind: dict[bool, ComparedRun] = {}
    for run in runs:
        first = first_of_kind.setdefault(run.is_evaluation, run)
        differing |= changed_settings(first.params, run.params, purpose="table").keys()

    # Between the kinds, only what both of them have can differ.
    trained = first_of_kind.get(False, runs[0]).params
    evaluated = first_of_kind.get(True, runs[0]).params
    changed = changed_settings(trained, evaluated, purpose="table")
    return differing | (changed.keys() & trained.keys() & evaluated.keys())


# ---- budgets and metrics ----------------------------------------------------------------------


def parse_budget(text: str) -> tuple[str, float | None]:
    """Read AXIS or AXIS=TOTAL, as `--at` has it. Raises UserError."""
    found = BUDGET.fullmatch(text)
    total = None
    if found is not None and found[2] is not None:
        total = float(found[2])
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

    shortest = min(run.totals[axis][-1] for run in runs)
    if total is None:
        total = shortest
    if total > shortest * (1 + SAME):
        raise UserError(
            f"not all runs have reached {total:,.5g} {axis}",
            where="--at",
            allowed=f"at most {shortest:,.5g}",
        )
    return Budget(axis=axis, total=total)


def _metric_line(
    key: str, runs: Sequence[ComparedRun], budget: Budget | None
) -> MetricLine:
    better = direction(key)
    final = []
    best = []
    equal = []
    for run in runs:
        points = [Point(value, (step,)) for step, value in run.series(key)]
        last = [NOTHING, *points][-1]
        final.append(last)

        # Of equal values the first one, which was cheaper.
        known = [point for point in points if better and math.isfinite(point.value)]
        pick = min
        if better == "higher":
            pick = max
        best.append(pick(known, key=attrgetter("value"), default=NOTHING))

        # An evaluation spends nothing: its results count at any budget.
        if budget is not None and not run.is_evaluation:
            last = _point_at(budget, run, points)
        equal.append(last)
    return MetricLine(
        key=key, better=better, final=tuple(final), best=tuple(best), equal=tuple(equal)
    )


def _point_at(budget: Budget, run: ComparedRun, points: Sequence[Point]) -> Point:
    """The value at a budget, on the line between its neighbours; after the last one, that one."""
    spent = dict(zip(run.steps, run.totals[budget.axis], strict=True))
    totals = [spent[point.steps[0]] for point in points]
    num_before = bisect_right(totals, budget.total * (1 + ROUNDING))
    before, after = [NOTHING, *points, NOTHING][num_before : num_before + 2]
    # Nothing lies between a number and what is none.
    if not finite([before]) or not finite([after]):
        return before

    gone = budget.total - totals[num_before - 1]
    if gone <= budget.total * ROUNDING:
        return before
    share = gone / (totals[num_before] - totals[num_before - 1])
    value = before.value + share * (after.value - before.value)
    return Point(value, before.steps + after.steps)


def finite(points: Iterable[Point]) -> list[float]:
    return [point.value for point in points if math.isfinite(point.value)]


# ---- seeds --------------------------------------------------------------------------------------


def varied_settings(runs: Sequence[ComparedRun]) -> list[dict[str, str]]:
    """What each run may owe its result to, apart from its seed.

    Of a run in a chain its place in it, and the settings in which runs at this place differ: all
    others follow from the place.
    """
    places = [_place_in_chain(run) for run in runs]
    settings = [
        {
            (key, SEED.sub("seed", text))
            for key, text in with_effect(run.params, "result").items()
            if not _is_seed(key)
        }
        for run in runs
    ]

    # What all runs at a place have in common cannot be the reason of a difference there.
    common: dict[Pairs, set[tuple[str, str]]] = {}
    for place, pairs in zip(places, settings, strict=True):
        common[place] = common.get(place, pairs) & pairs
    return [
        dict(place) | dict(pairs - common[place])
        for place, pairs in zip(places, settings, strict=True)
    ]


def _place_in_chain(run: ComparedRun) -> Pairs:
    """The name of the chain, the stage, and the values of the sweeps; empty without a chain."""
    return tuple(
        (key.removeprefix(CHAIN_TAG).removeprefix(".") or "chain", text)
        for key, text in sorted(run.params.items())
        if f"{key}.".startswith(f"{CHAIN_TAG}.") and not _is_seed(key)
    )


def _is_seed(key: str) -> bool:
    return key.rpartition(".")[2] == "seed"


def _seeds_of(run: ComparedRun) -> Pairs:
    """The seeds of a run and, in a chain, of the runs before it."""
    return tuple(
        (key, text)
        for key, text in sorted(run.params.items())
        if key == "seed" or (key.startswith(f"{CHAIN_TAG}.") and _is_seed(key))
    )


def seed_groups(runs: Sequence[ComparedRun]) -> dict[str, tuple[int, ...]]:
    """Group runs that differ in the seed alone, in the order of their first run."""
    groups: dict[Pairs, list[int]] = {}
    varied = varied_settings(runs)
    for place, (run, settings) in enumerate(zip(runs, varied, strict=True)):
        if _seeds_of(run):
            groups.setdefault(tuple(sorted(settings.items())), []).append(place)

    # The same run twice is no second seed.
    return {
        f"{runs[members[0]].label} and {len(members) - 1} more": tuple(members)
        for members in groups.values()
        if len({_seeds_of(runs[member]) for member in members}) > 1
    }


def spread(values: Sequence[float]) -> Spread | None:
    """Spread of values that are finite; None without any."""
    if not values:
        return None
    deviation = None
    if len(values) > 1:
        deviation = statistics.stdev(values)
    return Spread(mean=statistics.fmean(values), deviation=deviation)
