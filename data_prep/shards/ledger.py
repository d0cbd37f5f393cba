"""Write the ledger: the outcome of every input, and the limit on bad ones.

Owns: the list of reasons, ledger.parquet, the sum inputs = kept + rejected, the limit on bad
inputs.
Leaves out: deciding outcomes (`sources` by name, `images.check` by content, `selection`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
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
    "link_outside": "link or path that leads outside the source, or outside a table's folder",
    "link_loop": "link to a folder that holds the link",
    "truncated_tar": "a tar that ends too early or is damaged; members before that are used",
    "damaged_table": "a table, or a part of it, that cannot be read; one row for all its rows",
    "duplicate_path": "a path that a table names again",
    "duplicate_name": "a second member of this name in one tar",
    "duplicate_key": "a second sample of this key in one tar",
    "split_sample": "members of one sample that are not adjacent in their tar",
    "no_image": "sample without an image",
    "no_label": "sample without a usable label",
    "unreadable": "cannot be read (permission, read error, missing, path too long)",
    "packed": "packed with gzip inside its tar: only make_shards can repack it (index_shards)",
}
REASONS = EXTERNAL_REASONS | SELECTION_REASONS | SOURCE_FAULTS | FAULTS

LEDGER_SCHEMA = pa.schema(
    [
        ("path", pa.string()),
        ("split", pa.dictionary(pa.int32(), pa.string())),
        ("class", pa.dictionary(pa.int32(), pa.string())),
        ("status", pa.dictionary(pa.int32(), pa.string())),
        ("reason", pa.dictionary(pa.int32(), pa.string())),
        ("detail", pa.string()),
        ("key", pa.string()),
        ("blake3", pa.binary(32)),
    ]
)


class LedgerWriter:
    """Writes ledger.parquet in pieces and counts outcomes."""

    def __init__(self, folder: Path) -> None:
        self._commit = atomic_file(folder / LEDGER_NAME)
        self.num_rows = 0
        self.reasons: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = {}
        self.num_kept = 0
        self.num_repaired = 0

    def __enter__(self) -> LedgerWriter:
        file = self._commit.__enter__()
        self._writer = pq.ParquetWriter(file, LEDGER_SCHEMA, compression="zstd")
        return self

    def __exit__(self, *error: Any) -> None:
        self._writer.close()
        self._commit.__exit__(*error)

    def add(self, columns: Mapping[str, Sequence[Any]], changes: Sequence[str | None]) -> None:
        """Add rows: `path`, `split`, `class`, `reason`, `detail`, `key` and `blake3`."""
        status = []
        rows = zip(columns["path"], columns["reason"], changes, strict=True)
        for path, reason, change in rows:
            status.append("rejected" if reason else "repaired" if change else "kept")
            if reason is not None:
                self.reasons[reason] += 1
                examples = self.examples.setdefault(reason, [])
                if len(examples) < EXAMPLES_PER_REASON:
                    examples.append(path)
        self.num_rows += len(status)
        self.num_kept += sum(1 for s in status if s != "rejected")
        self.num_repaired += sum(1 for s in status if s == "repaired")
        reasons = [
            reason or change for reason, change in zip(columns["reason"], changes, strict=True)
        ]
        classes = [name or None for name in columns["class"]]
        values = {**columns, "class": classes, "status": status, "reason": reasons}
        table = pa.table(
            {
                field.name: pa.array(values[field.name], _plain(field.type))
                for field in LEDGER_SCHEMA
            }
        )
        self._writer.write_table(table.cast(LEDGER_SCHEMA))

    def check_bad_fraction(self, max_bad_fraction: float) -> None:
        """Raise UserError if too many of the inputs that were meant as images are bad."""
        external = sum(num for reason, num in self.reasons.items() if reason in EXTERNAL_REASONS)
        check_bad_fraction(
            self.reasons,
            self.examples,
            num_images=self.num_rows - external,
            max_bad_fraction=max_bad_fraction,
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "num_rows": self.num_rows,
            "num_kept": self.num_kept,
            "num_repaired": self.num_repaired,
            "reasons": dict(self.reasons),
            "examples": self.examples,
        }


def _plain(type_: pa.DataType) -> pa.DataType:
    return pa.string() if pa.types.is_dictionary(type_) else type_


def check_bad_fraction(
    reasons: Mapping[str, int],
    examples: Mapping[str, Sequence[str]],
    *,
    num_images: int,
    max_bad_fraction: float,
    stopped_early: bool = False,
) -> None:
    """Raise UserError if more than `max_bad_fraction` of the images are bad.

    stopped_early: not all images were looked at.
    """
    faults = {r: n for r, n in reasons.items() if r in SOURCE_FAULTS or r in FAULTS}
    bad = sum(faults.values())
    if bad > max_bad_fraction * num_images:
        raise UserError(
            f"{'at least ' if stopped_early else ''}{bad} of {num_images} images are bad, more "
            f"than the fraction {max_bad_fraction} allowed\n{describe_rejected(faults, examples)}",
            where="images.max_bad_fraction",
            next_step="fix, convert or remove these files, or raise images.max_bad_fraction",
        )


def describe_rejected(reasons: Mapping[str, int], examples: Mapping[str, Sequence[str]]) -> str:
    """Lines with a count, a meaning and the first examples per reason, most frequent first."""
    lines = []
    for reason, num in sorted(reasons.items(), key=lambda item: (-item[1], item[0])):
        shown = ", ".join(map(repr, examples.get(reason, ())[:EXAMPLES_PER_REASON]))
        lines.append(f"  {num:,} {reason} ({REASONS[reason]}): {shown}")
    return "\n".join(lines)
