"""Count what became of likely copies, and stop a run that drops too many.

Owns: the counts with examples, their limit, and the tables of candidates and verdicts.
Leaves out: comparing pictures (`second_look`), finding candidates (`search`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from data_prep.duplicates.second_look import Verdict
from vitscale.config.errors import UserError

NUM_EXAMPLES = 8
EXAMPLES_IN_ERROR = 3
# Likely copies compared in one unit of work.
CANDIDATES_PER_UNIT = 1024
# Kind -> meaning. `labels_differ` counts pairs that are also in `similar`.
KINDS = {
    "similar": "dropped as similar_duplicate",
    "labels_differ": "of these, a pair has two different labels",
    "in_evaluation_set": "dropped as in_evaluation_set",
    "unlike": "kept, because the pictures differ at 128 x 128 pixels",
}


class LikelyPair(NamedTuple):
    """An image and what it looks like, by paths in the source and classes."""

    path: str
    class_name: str
    other_path: str
    other_class: str


class LikelyCopies:
    """Counts by kind, and the first examples by path, for any order of `add`."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, list[LikelyPair]] = {}

    def add(self, pair: LikelyPair, *, kind: str) -> None:
        """kind: a key of KINDS; a similar pair of two classes is counted as `labels_differ` too."""
        kinds = [kind]
        if kind == "similar" and pair.class_name != pair.other_class:
            kinds.append("labels_differ")
        for one in kinds:
            self.counts[one] += 1
            self._show(one, [pair])

    def merge(self, stored: Mapping[str, Any]) -> None:
        """Add a stored result of `as_json`."""
        self.counts.update(stored["counts"])
        for kind, pairs in stored["examples"].items():
            self._show(kind, [LikelyPair(*pair) for pair in pairs])

    def _show(self, kind: str, pairs: Sequence[LikelyPair]) -> None:
        shown = self.examples.setdefault(kind, [])
        shown[:] = sorted([*shown, *pairs])[:NUM_EXAMPLES]

    def as_json(self) -> dict[str, Any]:
        return {"counts": dict(self.counts), "examples": self.examples}


def check_similar_fraction(copies: LikelyCopies, *, num_images: int, max_fraction: float) -> None:
    """Raise UserError if more than `max_fraction` of the images are dropped for what they show."""
    dropped = copies.counts["similar"] + copies.counts["in_evaluation_set"]
    if dropped <= max_fraction * num_images:
        return
    lines = []
    for kind, meaning in KINDS.items():
        shown = copies.examples.get(kind, [])[:EXAMPLES_IN_ERROR]
        pairs = ", ".join(f"{pair.path!r} like {pair.other_path!r}" for pair in shown)
        if copies.counts[kind]:
            lines.append(f"  {copies.counts[kind]:,} {meaning}: {pairs}")
    share = int(np.ceil(10_000 * dropped / num_images)) / 10_000
    raise UserError(
        f"{dropped:,} of {num_images:,} images look like others, more than the fraction "
        f"{max_fraction} allowed\n" + "\n".join(lines),
        where="selection.max_similar_fraction",
        next_step=f"look at these pairs: if they are copies, set selection.max_similar_fraction="
        f"{share}; if not, set selection.duplicates=drop_exact or leave out "
        "selection.evaluation_sets",
    )


def num_parts(candidates: pa.Table) -> int:
    """Units of work that the candidates of `find_duplicates` make."""
    return -(-len(candidates) // CANDIDATES_PER_UNIT)


def part_of_candidates(table: pa.Table, number: int) -> tuple[pa.Table, dict[int, list[int]]]:
    """(rows of one part, similar rank -> kept ranks). All rows of a rank are in one part."""
    ranks = table.column("rank").to_numpy()
    first, last = (
        np.searchsorted(ranks, ranks[at]) if at < len(ranks) else len(ranks)
        for at in (number * CANDIDATES_PER_UNIT, (number + 1) * CANDIDATES_PER_UNIT)
    )
    rows = table.slice(first, last - first)
    candidates: dict[int, list[int]] = {}
    for row in rows.to_pylist():
        if row["kind"] == "similar":
            candidates.setdefault(row["rank"], []).append(row["kept_rank"])
    return rows, candidates


def verdict_table(rows: pa.Table, verdicts: Iterable[Verdict]) -> pa.Table:
    """The rows of exact duplicates and of similar ones that are copies, sorted by rank."""
    dropped = [row for row in rows.to_pylist() if row["kind"] == "exact"]
    dropped += [
        {"rank": verdict.rank, "kept_rank": verdict.kept_rank, "kind": "similar"}
        for verdict in verdicts
        if verdict.is_copy
    ]
    return pa.Table.from_pylist(sorted(dropped, key=lambda row: row["rank"]), schema=rows.schema)


def joined_verdicts(tables: Iterable[pa.Table]) -> pa.Table:
    """All parts in order; without any, an empty table."""
    columns = {"rank": pa.uint64(), "kept_rank": pa.uint64(), "kind": pa.string()}
    empty = pa.schema(columns.items()).empty_table()
    return pa.concat_tables([empty, *tables])
