"""Write the ledger: the outcome of every input, and the limit on bad ones.

Owns: the list of reasons, ledger.parquet, the sum inputs = kept + rejected, the limit on bad
inputs.
Leaves out: deciding outcomes (`sources` by name, `images.check` by content, `steps`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data_prep.images.check import FAULTS
from vitscale.config.errors import UserError
from vitscale.distributed.atomic_files import atomic_file

LEDGER_NAME = "ledger.parquet"
EXAMPLES_PER_REASON = 3

# Not meant as images: listed, but no faults of the corpus.
EXTERNAL_REASONS = {
    "hidden": "hidden file, or inside a hidden folder",
    "other_name": "not named like an image",
}
# Sound images that the configuration leaves out.
SELECTION_REASONS = {
    "unknown_class": "its class is not in labels.space or labels.map",
    "small_class": "its class has fewer than source.min_images_per_class images",
    "left_out": "named by source.leave_out",
}
SOURCE_FAULTS = {
    "no_class": "image outside every class",
    "not_a_file": "not a regular file (pipe, socket, device, link in a tar)",
    "link_broken": "link to nothing",
    "linked_folder": "link to a folder inside a class; only class folders may be links",
    "truncated_tar": "a tar that ends too early or is damaged; members before that are used",
    "damaged_table": "a table that cannot be read, or its rest; one row for all its rows",
    "duplicate_path": "a path that a table names again",
    "duplicate_name": "a second member of this name in one tar",
    "duplicate_key": "a second image or sample of this key in one tar",
    "no_image": "sample without an image",
    "no_label": "sample without a usable label",
    "unreadable": "cannot be read (permission, read error, missing, path too long)",
    "packed": "packed with gzip inside its tar: only make_shards can repack it (index_shards)",
}
REASONS = EXTERNAL_REASONS | SELECTION_REASONS | SOURCE_FAULTS | FAULTS
BAD = frozenset(SOURCE_FAULTS) | frozenset(FAULTS)

_TEXT = pa.dictionary(pa.int32(), pa.string())
LEDGER_SCHEMA = pa.schema(
    [
        ("path", pa.string()),
        ("split", _TEXT),
        ("class", _TEXT),
        ("status", _TEXT),
        ("reason", _TEXT),
        ("detail", pa.string()),
        ("key", pa.string()),
        ("blake3", pa.binary(32)),
    ]
)


class Rejections:
    """Counts of rejected inputs by reason, and their first examples."""

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = {}

    def add(self, reasons: pa.Array | pa.ChunkedArray, paths: pa.Array | pa.ChunkedArray) -> None:
        """reasons: null for inputs that are kept."""
        reasons = reasons.cast(pa.string())
        for reason, num in zip(*pc.value_counts(reasons.drop_null()).flatten(), strict=True):
            name = reason.as_py()
            self.reasons[name] += num.as_py()
            shown = self.examples.setdefault(name, [])
            if len(shown) < EXAMPLES_PER_REASON:
                found = pc.indices_nonzero(pc.equal(reasons, reason))[:EXAMPLES_PER_REASON]
                shown += paths.take(found).to_pylist()
                del shown[EXAMPLES_PER_REASON:]

    @property
    def num_bad(self) -> int:
        return sum(num for reason, num in self.reasons.items() if reason in BAD)

    def describe(self) -> str:
        """Return a line with count, meaning and examples per reason, most frequent first."""
        lines = []
        for reason, num in sorted(self.reasons.items(), key=lambda item: (-item[1], item[0])):
            shown = ", ".join(repr(path) for path in self.examples.get(reason, ()))
            lines.append(f"  {num:,} {reason} ({REASONS[reason]}): {shown}")
        return "\n".join(lines)

    def check(self, *, num_images: int, max_bad_fraction: float, at_least: bool = False) -> None:
        """Raise UserError if more than `max_bad_fraction` of the images are bad.

        num_images: inputs without hidden files and other names. at_least: not all were read.
        """
        if self.num_bad <= max_bad_fraction * num_images:
            return
        bad = Rejections()
        bad.reasons = Counter({r: n for r, n in self.reasons.items() if r in BAD})
        bad.examples = self.examples
        raise UserError(
            f"{'at least ' if at_least else ''}{bad.num_bad} of {num_images} images are bad, more "
            f"than the fraction {max_bad_fraction} allowed\n{bad.describe()}",
            where="images.max_bad_fraction",
            next_step="fix, convert or remove these files, or raise images.max_bad_fraction",
        )


def describe_inputs(inputs: Mapping[str, Any]) -> str:
    """Describe the totals of a ledger, as a manifest has them."""
    num, kept, rejected = inputs["num_rows"], inputs["num_kept"], Rejections()
    rejected.reasons.update(inputs["reasons"])
    rejected.examples.update(inputs["examples"])
    repaired = f" ({inputs['num_repaired']:,} repaired)" if inputs["num_repaired"] else ""
    text = f"{num:,} inputs = {kept:,} kept{repaired} + {num - kept:,} rejected"
    return f"{text}\n{rejected.describe()}" if kept < num else text


@dataclass
class LedgerSums:
    """Counts of inputs by outcome."""

    num_rows: int = 0
    num_kept: int = 0
    num_repaired: int = 0
    rejected: Rejections = field(default_factory=Rejections)
    source_fingerprint: str = ""

    def check_bad_fraction(self, max_bad_fraction: float) -> None:
        """Raise UserError if too many of the inputs that were meant as images are bad."""
        reasons = self.rejected.reasons
        external = sum(num for reason, num in reasons.items() if reason in EXTERNAL_REASONS)
        self.rejected.check(num_images=self.num_rows - external, max_bad_fraction=max_bad_fraction)

    def as_json(self) -> dict[str, Any]:
        return {
            "num_rows": self.num_rows,
            "num_kept": self.num_kept,
            "num_repaired": self.num_repaired,
            "reasons": dict(self.rejected.reasons),
            "examples": self.rejected.examples,
        }


def write_ledger(folder: Path, tables: Iterable[pa.Table]) -> LedgerSums:
    """Write ledger.parquet; return its sums.

    tables: `path`, `split`, `class`, `reason` (of a rejection), `changes`, `detail`, `key` and
    `blake3`.
    """
    sums = LedgerSums()
    with (
        atomic_file(folder / LEDGER_NAME) as file,
        pq.ParquetWriter(file, LEDGER_SCHEMA, compression="zstd") as writer,
    ):
        for rows in tables:
            reason, changes = (rows[name].cast(pa.string()) for name in ("reason", "changes"))
            is_rejected, is_repaired = pc.is_valid(reason), pc.is_valid(changes)
            status = pc.if_else(is_repaired, "repaired", "kept")
            status = pc.if_else(is_rejected, "rejected", status)
            classes = rows["class"].cast(pa.string())
            made = {
                "class": pc.if_else(pc.equal(classes, ""), None, classes),
                "status": status,
                "reason": pc.coalesce(reason, changes),
            }
            columns = [made[n] if n in made else rows[n] for n in LEDGER_SCHEMA.names]
            writer.write_table(pa.table(columns, LEDGER_SCHEMA.names).cast(LEDGER_SCHEMA))
            sums.rejected.add(reason, rows["path"])
            sums.num_rows += len(rows)
            sums.num_kept += reason.null_count
            sums.num_repaired += pc.sum(pc.equal(status, "repaired")).as_py() or 0
    return sums
