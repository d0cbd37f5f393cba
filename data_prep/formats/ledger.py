"""Write the ledger: the outcome of every input, and the limit on bad ones.

Owns: the list of reasons, ledger.parquet, the sum inputs = kept + rejected, the limit on bad
inputs.
Leaves out: deciding outcomes (`sources` by name, `images.check` by content, `steps`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
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

# These were not meant as images: they are listed, but are no faults of the corpus.
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
SOURCE_FAULTS = dict(
    line.strip().split(": ", 1)
    for line in """\
    no_class: image outside every class
    not_a_file: not a regular file (pipe, socket, device, link in a tar)
    link_broken: link to nothing
    linked_folder: link to a folder inside a class; only class folders may be links
    truncated_tar: a tar that ends too early or is damaged; members before that are used
    damaged_table: a table that cannot be read, or its rest; one row for all its rows
    duplicate_path: a file that is named again, by any path; each time if its classes differ
    duplicate_name: a second member of this name in one tar
    duplicate_key: a second image or sample of this key in one tar
    no_image: sample without an image, or with no more than its path
    no_label: no usable label where source.label says: cls or json:FIELD in tars, else a column
    unreadable: cannot be read (permission, read error, missing, path too long)
    packed: packed with gzip inside its tar: `vitscale prepare shards` unpacks it""".splitlines()
)
REASONS = EXTERNAL_REASONS | SELECTION_REASONS | SOURCE_FAULTS | FAULTS
BAD = frozenset(SOURCE_FAULTS) | frozenset(FAULTS)

_TEXT = pa.dictionary(pa.int32(), pa.string())
LEDGER_SCHEMA = pa.schema(
    {
        "path": "string",
        "split": _TEXT,
        "class": _TEXT,
        "status": _TEXT,
        "reason": _TEXT,
        "detail": "string",
        "key": "string",
        "blake3": pa.binary(32),
    }
)


class Outcomes:
    """Counts of inputs by outcome, and the first examples of each reason."""

    def __init__(self) -> None:
        self.num_rows = self.num_kept = self.num_repaired = 0
        self.reasons: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = {}

    def add(self, rows: pa.Table) -> None:
        """rows: `path` and `reason`, null for inputs that are kept."""
        reasons = rows["reason"].cast(pa.string())
        self.num_rows += len(rows)
        self.num_kept += reasons.null_count
        # Counted by Arrow, since a corpus has millions of rows and few reasons.
        for group in reasons.drop_null().value_counts().to_pylist():
            reason = group["values"]
            self.reasons[reason] += group["counts"]
            shown = self.examples.setdefault(reason, [])
            num_missing = EXAMPLES_PER_REASON - len(shown)
            # Only the examples that are still missing are looked up.
            positions = pc.indices_nonzero(pc.equal(reasons, reason))[:num_missing]
            shown += rows["path"].take(positions).to_pylist()

    def as_json(self) -> dict[str, Any]:
        return vars(self) | {"reasons": dict(self.reasons)}

    @property
    def num_images(self) -> int:
        """Inputs without hidden files and other names."""
        return self.num_rows - sum(self.reasons[name] for name in EXTERNAL_REASONS)

    @property
    def num_bad(self) -> int:
        return sum(num for reason, num in self.reasons.items() if reason in BAD)

    def describe(self, among: Collection[str] = REASONS) -> str:
        """Return a line with count, meaning and examples per reason, most frequent first."""
        lines = []
        # Equal counts are ordered by name, so that the text is always the same.
        for reason, num in sorted(
            self.reasons.items(), key=lambda item: (-item[1], item[0])
        ):
            if reason in among:
                shown = ", ".join(map(repr, self.examples.get(reason, ())))
                lines.append(f"  {num:,} {reason} ({REASONS[reason]}): {shown}")
        return "\n".join(lines)

    def check(self, *, max_bad_fraction: float, num_images: int) -> None:
        """Raise UserError if more than `max_bad_fraction` of all images are bad.

        num_images: number of all images, of which only some may be counted here.
        """
        if self.num_bad > max_bad_fraction * num_images:
            next_step = (
                "fix, convert or remove these files, or raise images.max_bad_fraction"
            )
            # Most images without a label mean a wrong setting rather than broken files.
            if 2 * self.reasons["no_label"] > self.num_bad:
                next_step = (
                    "set source.label to where the labels are, or labels.values=none"
                )

            raise UserError(
                f"{self.num_bad} of {num_images} images are bad, more than the fraction "
                f"{max_bad_fraction} allowed\n{self.describe(BAD)}",
                where="images.max_bad_fraction",
                next_step=next_step,
            )


def describe_inputs(inputs: Mapping[str, Any]) -> str:
    """Describe the totals of a ledger, as a manifest has them."""
    sums = Outcomes()
    vars(sums).update(inputs)
    num_rejected = sums.num_rows - sums.num_kept
    text = f"{sums.num_rows:,} inputs = {sums.num_kept:,} kept"
    if sums.num_repaired:
        text += f" ({sums.num_repaired:,} repaired)"
    text += f" + {num_rejected:,} rejected"
    if num_rejected:
        text += f"\n{sums.describe()}"
    return text


def regrouped(tables: Iterable[pa.Table], num_rows: int) -> Iterator[pa.Table]:
    """Yield the rows of consecutive tables, so many at a time, and a last rest."""
    waiting: list[pa.Table] = []
    for table in tables:
        rows = pa.concat_tables([*waiting, table])
        while len(rows) >= num_rows:
            yield rows.slice(0, num_rows)
            rows = rows.slice(num_rows)
        waiting = [rows]
    yield from filter(len, waiting)


def write_ledger(folder: Path, tables: Iterable[pa.Table]) -> Outcomes:
    """Write ledger.parquet; return its sums.

    tables: `path`, `split`, `class`, `reason` (of a rejection), `changes`, `detail`, `key` and
    `blake3`.
    """
    sums = Outcomes()
    with (
        atomic_file(folder / LEDGER_NAME) as file,
        pq.ParquetWriter(file, LEDGER_SCHEMA, compression="zstd") as writer,
    ):
        for rows in tables:
            reason, changes = (
                rows[name].cast(pa.string()) for name in ("reason", "changes")
            )

            status = pc.if_else(pc.is_valid(changes), "repaired", "kept")
            # A rejection outweighs changes: nothing of the image is stored.
            status = pc.if_else(pc.is_valid(reason), "rejected", status)
            classes = rows["class"].cast(pa.string())
            made = {
                "class": pc.if_else(pc.equal(classes, ""), None, classes),
                "status": status,
                "reason": pc.coalesce(reason, changes),
            }

            columns = [made[n] if n in made else rows[n] for n in LEDGER_SCHEMA.names]
            writer.write_table(
                pa.table(columns, LEDGER_SCHEMA.names).cast(LEDGER_SCHEMA)
            )
            sums.add(rows)
            # The sum of an empty column is null.
            sums.num_repaired += pc.sum(pc.equal(status, "repaired")).as_py() or 0
    return sums
