"""Group runs that differ in their seed alone, and tell how far their results spread."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from launch.comparison.runs import ComparedRun

# Settings that differ between repetitions of one run and cannot change its result, but the seed.
NOT_COMPARED = ("seed", "name", "output", "tracking", "launch", "checkpoint")
# Of a path such as runs/pretrain_seed0, in which the repetitions differ, too.
SEED = re.compile(r"seed[-_=]?\d+")


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedGroup:
    """Runs of equal settings with different seeds."""

    members: tuple[int, ...]
    """Places in the list of runs, at least two."""
    label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Mean and sample standard deviation over the seeds."""

    mean: float
    deviation: float
    count: int


def seed_groups(runs: Sequence[ComparedRun]) -> tuple[SeedGroup, ...]:
    """Groups in the order of their first run. Runs without a seed are in none."""
    groups: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for i, run in enumerate(runs):
        if "seed" in run.params:
            kept = (
                (key, SEED.sub("seed", value))
                for key, value in run.params.items()
                if not _left_out(key)
            )
            groups.setdefault(tuple(sorted(kept)), []).append(i)
    return tuple(
        SeedGroup(
            members=tuple(members), label=f"{runs[members[0]].label} and {len(members) - 1} more"
        )
        for members in groups.values()
        if len({runs[i].params["seed"] for i in members}) > 1
    )


def spread(values: Sequence[float | None]) -> Spread | None:
    """None with fewer than two finite values."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if len(known) < 2:
        return None
    return Spread(mean=statistics.fmean(known), deviation=statistics.stdev(known), count=len(known))


def _left_out(key: str) -> bool:
    return key.split(".")[0] in NOT_COMPARED
