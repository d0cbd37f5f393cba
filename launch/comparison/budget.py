"""Compare runs where they have spent equally much: steps, samples, hours or FLOPs.

Leaves out: what a run had spent at each step (`progress`).
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from launch.comparison.progress import AXES, Progress, progress_of
from launch.comparison.runs import ComparedRun
from vitscale.config.errors import UserError

BUDGET = re.compile(rf"({'|'.join(AXES)})(?:=([0-9.]+(?:e[+-]?[0-9]+)?))?", re.IGNORECASE)
# Relative difference below which two runs are as long as each other.
SAME = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """A point to compare at: the total of an axis, and the last logged step of each run there."""

    axis: str
    """One of `AXES`."""
    total: float
    steps: tuple[int | None, ...]
    """None for a run that had logged nothing yet."""

    @property
    def title(self) -> str:
        return f"at {self.total:,.5g} {'FLOPs' if self.axis == 'flops' else self.axis}"


def parse_budget(text: str) -> tuple[str, float | None]:
    """Read AXIS or AXIS=TOTAL, as `--at` has it. Raises UserError."""
    found = BUDGET.fullmatch(text)
    total = None if found is None or found[2] is None else float(found[2])
    if found is None or total == 0 or (total is not None and not math.isfinite(total)):
        raise UserError(
            f"{text!r} is no budget",
            where="--at",
            allowed=f"one of {', '.join(AXES)}, or with a total: steps=10000, samples=1e6",
        )
    return found[1].lower(), total


def equal_budget(runs: Sequence[ComparedRun], axis: str, total: float | None) -> Budget:
    """The total of `axis` that all runs have reached, or the one given.

    Raises UserError for a run whose total is unknown, or that has not come so far.
    """
    progress = [progress_of(run) for run in runs]
    reached = [each.along(axis) for each in progress]
    for run, totals in zip(runs, reached, strict=True):
        if totals is None:
            raise UserError(
                f"the {axis} of run {run.label} are not known",
                where="--at",
                allowed="samples need data.global_batch; FLOPs need the run folder",
                next_step="compare at another budget, for example --at steps",
            )
    shortest = min(totals[-1] for totals in reached if totals is not None)
    if total is not None and total > shortest * (1 + SAME):
        raise UserError(
            f"not all runs have come to {total:,.5g} {axis}",
            where="--at",
            allowed=f"at most {shortest:,.5g}",
        )
    chosen = shortest if total is None else total
    return Budget(
        axis=axis, total=chosen, steps=tuple(_step_at(each, axis, chosen) for each in progress)
    )


def have_equal_length(runs: Sequence[ComparedRun]) -> bool:
    """Whether all runs have logged up to the same step."""
    return len({run.last_step for run in runs}) == 1


def value_at(run: ComparedRun, key: str, step: int | None) -> float | None:
    """The last value of a metric that is not after `step`."""
    if step is None:
        return None
    steps, values = run.series(key)
    place = bisect_right(steps, step) - 1
    return values[place] if place >= 0 else None


def _step_at(progress: Progress, axis: str, total: float) -> int | None:
    totals = progress.along(axis)
    assert totals is not None
    # A total that went through division may end a little below.
    place = bisect_right(totals, total * (1 + 1e-9)) - 1
    return progress.steps[place] if place >= 0 else None
