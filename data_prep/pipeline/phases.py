"""Define the phases of a preparation and their order, and show their progress.

Leaves out: what a phase does with a unit (one module per phase), and the processes (`runner`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from data_prep.pipeline import finishing, listing, planning, selection, shard_writing
from data_prep.pipeline.workspace import Preparation
from vitscale.tracking.console import ElapsedProgress, ItemProgress


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One step of a preparation."""

    title: str
    units: Callable[[Preparation], list[str]]
    do: Callable[[Preparation, str], None]
    weight: Callable[[Preparation, str], int] | None = None
    """Images (or containers) in a unit, for progress; None: only the time is shown."""
    rows: Callable[[Preparation, str], int] | None = None
    """Inputs in a finished unit, where `weight` counts containers: their total is unknown."""


def _one(name: str) -> Callable[[Preparation], list[str]]:
    return lambda p: [name]


def _per_bucket(name: str) -> Callable[[Preparation], list[str]]:
    return lambda p: [f"{name}-{number:06d}" for number in range(p.result("buckets"))]


def _shard_rows(p: Preparation, unit: str) -> int:
    _, split, number = unit.split("-")
    return planning.read_plan(p)[split].shard_lengths[int(number)]


PHASES = (
    Phase(title="open source", units=_one("containers"), do=listing.list_containers),
    Phase(
        title="list inputs",
        units=listing.scan_units,
        do=listing.scan,
        weight=listing.num_containers,
        rows=listing.num_listed,
    ),
    Phase(title="count inputs", units=_one("buckets"), do=listing.count_buckets),
    Phase(title="order inputs", units=_per_bucket("bucket"), do=listing.make_bucket),
    Phase(title="select classes", units=_one("selection"), do=selection.select_classes),
    Phase(title="assign splits", units=_per_bucket("assignment"), do=planning.assign_splits),
    Phase(title="plan shards", units=_one("plan"), do=planning.make_plan),
    Phase(
        title="write shards",
        units=shard_writing.shard_units,
        do=shard_writing.write_shard,
        weight=_shard_rows,
    ),
    Phase(
        title="write index and ledger",
        units=finishing.side_file_units,
        do=finishing.write_side_file,
    ),
    Phase(title="finish", units=_one("finish"), do=finishing.finish),
)


class PhaseProgress:
    """Shows progress, from the phase of each worker and the finished units."""

    def __init__(self, p: Preparation, reached: Any) -> None:
        self.p, self._reached = p, reached
        self._shown = -1
        self._weights: dict[str, int] = {}
        self._done: set[str] = set()
        self._rows = 0
        self._line: ItemProgress | ElapsedProgress | None = None

    def update(self) -> None:
        """Show the current state. Errors of storage are left to the workers to report."""
        with suppress(OSError):
            self._update()

    def _update(self) -> None:
        reached = max(self._reached)
        if reached != self._shown:
            self._show(reached)
        if self._line is None:
            return
        if isinstance(self._line, ItemProgress):
            self._line.update(self._weight_done())
        else:
            self._line.update(self._note())

    def _weight_done(self) -> int:
        """The weight of all units finished so far."""
        new = {unit for unit in self._weights.keys() - self._done if self.p.has_result(unit)}
        self._done |= new
        if (rows := PHASES[self._shown].rows) is not None:
            with suppress(FileNotFoundError):  # another process ended the preparation
                self._rows += sum(rows(self.p, unit) for unit in new)
        return sum(self._weights[unit] for unit in self._done)

    def _note(self) -> str:
        if PHASES[self._shown].rows is None:
            return ""
        done, total = self._weight_done(), sum(self._weights.values())
        return f"{done:,} of {total:,} containers, {self._rows:,} inputs"

    def _show(self, reached: int) -> None:
        self.close()
        self._shown, self._done, self._weights, self._rows = reached, set(), {}, 0
        phase = PHASES[reached]
        try:
            if phase.weight is not None:
                units = phase.units(self.p)
                self._weights = {unit: phase.weight(self.p, unit) for unit in units}
        except FileNotFoundError:
            return  # another process finished the preparation
        if phase.weight is None or phase.rows is not None:
            self._line = ElapsedProgress(phase.title)
        else:
            self._line = ItemProgress(phase.title, total=sum(self._weights.values()))

    def close(self) -> None:
        with suppress(OSError):
            self._close()

    def _close(self) -> None:
        if isinstance(self._line, ElapsedProgress):
            self._line.close(self._note())
        elif self._line is not None:
            self._line.close()
        self._line = None
