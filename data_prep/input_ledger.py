"""The ledger: what became of every input file.

Owns: reasons, the sum inputs = kept + rejected, ledger.parquet, the limit on bad inputs.
Leaves out: the judgement itself (`image_folder` by name, `image_check` by content).
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data_prep.image_check import ImageFacts
from data_prep.image_folder import InputFile
from vitscale.atomic_files import atomic_file
from vitscale.errors import UserError

LEDGER_NAME = "ledger.parquet"
EXAMPLES_PER_REASON = 3

# Files that were never meant as images: listed in the ledger, no fault of the corpus.
FOREIGN_REASONS = {
    "hidden": "hidden file, or inside a hidden folder",
    "other_name": "not named like an image",
}
FAULT_REASONS = {
    "no_class": "image outside every class folder",
    "not_a_file": "not a regular file (pipe, socket, device)",
    "link_broken": "link to nothing",
    "link_outside": "link to a place outside the source",
    "link_loop": "link to a folder that holds the link",
    "unreadable": "cannot be read (permission or read error)",
    "empty": "zero bytes",
    "too_large": "file too large for an image",
    "not_an_image": "content is not JPEG, PNG or WebP",
    "bad_header": "broken header",
    "too_many_pixels": "more pixels than images.max_pixels",
    "deep_grey": "16- or 32-bit grey values, which have no agreed 8-bit form",
    "bad_pixels": "cannot be decoded (truncated or damaged)",
}
REASONS = FOREIGN_REASONS | FAULT_REASONS


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One input file and its fate; `facts` is None where the name alone decided."""

    file: InputFile
    facts: ImageFacts | None

    @property
    def reason(self) -> str | None:
        """None: kept. Otherwise a key of REASONS."""
        return self.file.reason or (self.facts.reason if self.facts else None)


def make_ledger(
    files: Sequence[InputFile], *, facts_of: dict[str, ImageFacts]
) -> tuple[LedgerRow, ...]:
    """One row per input; every file that its name did not reject must have been judged."""
    rows = tuple(LedgerRow(file, facts_of.get(file.path)) for file in files)
    assert all(row.reason in REASONS or (row.reason is None and row.facts) for row in rows)
    return rows


def rejected_by_reason(rows: Sequence[LedgerRow]) -> dict[str, int]:
    """Reason -> number of files, most frequent first."""
    return dict(Counter(row.reason for row in rows if row.reason is not None).most_common())


def check_bad_fraction(rows: Sequence[LedgerRow], *, max_bad_fraction: float) -> None:
    """Refuse a corpus with too many faulty images, or a class of which nothing is left."""
    judged = [row for row in rows if row.reason not in FOREIGN_REASONS]
    bad = [row for row in judged if row.reason is not None]
    kept_classes = {row.file.class_name for row in judged if row.reason is None}
    lost = sorted({row.file.class_name or "" for row in bad if row.file.class_name} - kept_classes)
    if len(bad) > max_bad_fraction * len(judged):
        raise UserError(
            f"{len(bad)} of {len(judged)} images are bad, more than the share "
            f"{max_bad_fraction} allowed\n{describe_rejected(bad)}",
            where="images.max_bad_fraction",
            next_step="mend or remove these files, or raise images.max_bad_fraction",
        )
    if lost:
        raise UserError(
            f"no usable image is left of {len(lost)} classes: {', '.join(lost[:10])}\n"
            f"{describe_rejected([row for row in bad if row.file.class_name in lost])}",
            where="source.path",
            next_step="mend these files or remove the class folders",
        )


def describe_rejected(rows: Sequence[LedgerRow]) -> str:
    """Lines with a count, a meaning and the first examples per reason."""
    lines = []
    for reason, num in rejected_by_reason(rows).items():
        examples = [row.file.printable_path for row in rows if row.reason == reason]
        shown = ", ".join(repr(path) for path in examples[:EXAMPLES_PER_REASON])
        lines.append(f"  {num} {reason} ({REASONS[reason]}): {shown}")
    return "\n".join(lines)


def source_fingerprint(rows: Sequence[LedgerRow]) -> str:
    """Hash over every input's path, content and fate, in ledger order."""
    digest = hashlib.sha256()
    for row in rows:
        content = row.facts.sha256 if row.facts and row.facts.sha256 else b"-"
        path = hashlib.sha256(os.fsencode(f"{row.file.split}/{row.file.path}")).digest()
        digest.update(path + content + (row.reason or "kept").encode())
    return digest.hexdigest()


def write_ledger(
    folder: Path, *, rows: Sequence[LedgerRow], split_and_key: dict[str, tuple[str, str]]
) -> None:
    """Write ledger.parquet; `split_and_key` maps the path of each kept file to where it went."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    assert len(split_and_key) == sum(1 for row in rows if row.reason is None)
    placed = [split_and_key.get(row.file.path, (row.file.split, None)) for row in rows]
    names = pa.dictionary(pa.int32(), pa.string())
    table = pa.table(
        {
            "path": pa.array([row.file.printable_path for row in rows], pa.string()),
            "split": pa.array([split for split, _ in placed], names),
            "class": pa.array([row.file.class_name for row in rows], names),
            "status": pa.array(["rejected" if row.reason else "kept" for row in rows], names),
            "reason": pa.array([row.reason for row in rows], names),
            "key": pa.array([key for _, key in placed], pa.string()),
            "sha256": pa.array(
                [row.facts.sha256 if row.facts else None for row in rows], pa.binary(32)
            ),
        }
    )
    with atomic_file(folder / LEDGER_NAME) as file:
        pq.write_table(table, file, compression="zstd")
