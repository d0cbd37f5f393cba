"""Count rejected inputs during the work, so that a bad corpus stops it early.

Owns: counts by reason with examples, their sum over all finished units, and the early check.
Leaves out: the reasons, the limit, and the final check over all inputs (`shards.ledger`).

A unit writes one file whose name ends in its number of faults, so the sum over thousands of units
takes one listing of one folder.
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
    """Counts by reason and the first examples by name, for any order of `add`."""

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
        """Add a stored result of `as_json`."""
        self.reasons.update(stored["reasons"])
        for reason, paths in stored["examples"].items():
            self._show(reason, paths)

    def _show(self, reason: str, paths: Sequence[str]) -> None:
        shown = self.examples.setdefault(reason, [])
        shown[:] = sorted([*shown, *paths])[:EXAMPLES_PER_REASON]

    def as_json(self) -> dict[str, Any]:
        return {"reasons": dict(self.reasons), "examples": self.examples}


def check_so_far(p: Preparation, unit: str, found: Rejections) -> None:
    """Store what a finished unit rejected. Raises UserError if all units rejected too many.

    Never stricter than the final check: it compares the faults found so far with all inputs.
    """
    if found.reasons:
        write_json(p.path("rejected", f"{unit}.{found.num_faults}"), found.as_json())
    if not found.num_faults:
        return
    listed = rejected_by_listing(p)
    num_images, limit = num_meant_as_images(p), p.run.images.max_bad_fraction
    faults = listed.num_faults + sum(int(name.rpartition(".")[2]) for name in _stored(p))
    if faults > limit * num_images:
        so_far = rejected_so_far(p)
        check_bad_fraction(
            so_far.reasons,
            so_far.examples,
            num_images=num_images,
            max_bad_fraction=limit,
            stopped_early=True,
        )


def num_meant_as_images(p: Preparation) -> int:
    """All inputs without hidden files and other names."""
    listed = rejected_by_listing(p)
    num: int = p.result("inputs")["num_inputs"]
    return num - sum(listed.reasons[reason] for reason in EXTERNAL_REASONS)


def rejected_by_listing(p: Preparation) -> Rejections:
    """What listing has rejected: by name, type or table."""
    listed = Rejections()
    listed.merge(p.result("inputs"))
    return listed


def rejected_so_far(p: Preparation) -> Rejections:
    """What listing and all finished units have rejected."""
    so_far = rejected_by_listing(p)
    for name in _stored(p):
        so_far.merge(json.loads(p.path("rejected", name).read_text()))
    return so_far


def _stored(p: Preparation) -> list[str]:
    # Names with a leading dot are unfinished files.
    return [name for name in os.listdir(p.path("rejected")) if not name.startswith(".")]
