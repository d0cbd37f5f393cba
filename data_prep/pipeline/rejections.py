"""Rejected inputs counted while the work goes on, so that a rotten corpus stops early.

Owns: counts by reason with examples, the sum over all units that are done, and the early verdict.
Leaves out: the reasons and the limit (`ledger`), which decides in the end about all inputs.

A unit leaves one file whose name ends in its number of faults, so the sum over thousands of units
takes one look at one folder.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from data_prep.images.check import FAULTS
from data_prep.pipeline.workspace import Preparation
from data_prep.shards.ledger import (
    EXAMPLES_PER_REASON,
    EXTERNAL_REASONS,
    SOURCE_FAULTS,
    check_bad_fraction,
)
from vitscale.distributed.atomic_files import write_json


class Rejections:
    """Counts by reason, and the first examples by name: the same in whatever order they come."""

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = {}

    @property
    def num_faults(self) -> int:
        return sum(n for r, n in self.reasons.items() if r in SOURCE_FAULTS or r in FAULTS)

    def add(self, reason: str, path: str) -> None:
        self.reasons[reason] += 1
        self._show(reason, [path])

    def merge(self, stored: Mapping[str, Any]) -> None:
        """Add what `as_json` gave."""
        self.reasons.update(stored["reasons"])
        for reason, paths in stored["examples"].items():
            self._show(reason, paths)

    def _show(self, reason: str, paths: Sequence[str]) -> None:
        shown = self.examples.setdefault(reason, [])
        shown[:] = sorted([*shown, *paths])[:EXAMPLES_PER_REASON]

    def as_json(self) -> dict[str, Any]:
        return {"reasons": dict(self.reasons), "examples": self.examples}


def check_so_far(p: Preparation, unit: str, found: Rejections) -> None:
    """Note what a unit that is done has rejected. Raises UserError when all units found too many.

    Asks no more than the ledger will: of the faults, those found so far; of the inputs, all.
    """
    if found.reasons:
        write_json(p.path("rejected", f"{unit}.{found.num_faults}"), found.as_json())
    if not found.num_faults:
        return
    listed = rejected_by_listing(p)
    foreign = sum(listed.reasons[reason] for reason in EXTERNAL_REASONS)
    num_judged, limit = p.result("inputs")["num_inputs"] - foreign, p.run.images.max_bad_fraction
    faults = listed.num_faults + sum(int(name.rpartition(".")[2]) for name in _noted(p))
    if faults > limit * num_judged:
        so_far = rejected_so_far(p)
        check_bad_fraction(
            so_far.reasons, so_far.examples, num_judged=num_judged, max_bad_fraction=limit
        )


def rejected_by_listing(p: Preparation) -> Rejections:
    """What name, type or table alone reject."""
    listed = Rejections()
    listed.merge(p.result("inputs"))
    return listed


def rejected_so_far(p: Preparation) -> Rejections:
    """What listing and all units since have rejected."""
    so_far = rejected_by_listing(p)
    for name in _noted(p):
        so_far.merge(json.loads(p.path("rejected", name).read_text()))
    return so_far


def _noted(p: Preparation) -> list[str]:
    # Those with a dot in front are not whole yet.
    return [name for name in os.listdir(p.path("rejected")) if not name.startswith(".")]
