"""Read the rows of all lists, some at a time: as they were listed, or in their stored order.

Owns: runs, marks, buckets.

A run is one batch of a list, sorted by the first half of its order hashes. The stored order is that
of the hashes, then of the paths. Hashes are uniform, so a range of them has a known share of the
rows: a bucket, which is sorted alone. Buckets that follow each other are the corpus in its order.
The plan notes what becomes of a row in a byte of `marks`, by the row's place in the lists.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_prep.steps.list_inputs import ROW_SCHEMA, list_units
from data_prep.steps.work import WorkFolder

# Bytes of the lists in a bucket; sorting takes four times as much.
BUCKET_BYTES = 256 << 20
NUM_HASHES = 1 << 64
# Reason of a row with each mark; those held out are kept, in another split.
DUPLICATE, SMALL, HELD_OUT = 1, 2, 3
REASONS = [None, "duplicate_path", "small_class", None]
STORED_ORDER = [(name, "ascending") for name in ("order_high", "order_low", "path")]


def read_runs(work: WorkFolder) -> Iterator[pa.RecordBatch]:
    """Yield all runs. Each is mapped from its file only while it is used."""
    for unit in list_units(work):
        with pa.memory_map(str(work.path / unit)) as file:
            reader = pa.ipc.open_file(file)
            for number in range(reader.num_record_batches):
                yield reader.get_batch(number)


def marked_runs(
    work: WorkFolder, marks: np.ndarray
) -> Iterator[tuple[pa.RecordBatch, np.ndarray]]:
    """Yield each run with the marks of its rows, which can be set."""
    start = 0
    for run in read_runs(work):
        yield run, marks[start : start + len(run)]
        start += len(run)


def judged(
    work: WorkFolder, run: pa.RecordBatch | pa.Table, marks: np.ndarray
) -> pa.Table:
    """Return rows with the reasons and splits that their marks say."""
    rows = pa.table(run)
    if marks.any():
        reason = pc.coalesce(rows["reason"], pa.array(REASONS).take(pa.array(marks)))
        rows = with_column(rows, "reason", reason)
        moved = pa.array(marks == HELD_OUT)
        split = pc.if_else(moved, work.run.source.holdout_split, rows["split"])
        rows = with_column(rows, "split", split)
    return rows


def with_column(rows: pa.Table, name: str, column: pa.ChunkedArray) -> pa.Table:
    """Replace or add a column."""
    if name not in rows.column_names:
        return rows.append_column(name, column)
    return rows.set_column(rows.column_names.index(name), name, column)


def stored_rows(
    work: WorkFolder, marks: np.ndarray, *, only_rejected: bool = False
) -> Iterator[pa.Table]:
    """Yield the judged rows of one bucket after the other, in stored order."""
    sizes = [(work.path / unit).stat().st_size for unit in list_units(work)]
    num_buckets = sum(sizes) // BUCKET_BYTES + 1

    for number in range(num_buckets):
        # First and last hash of the bucket.
        first = np.uint64(number * NUM_HASHES // num_buckets)
        last = np.uint64((number + 1) * NUM_HASHES // num_buckets - 1)
        parts = []
        marks_of_parts = [marks[:0]]
        for run, marked in marked_runs(work, marks):
            hashes = run["order_high"].to_numpy()
            start = np.searchsorted(hashes, first, side="left")
            end = np.searchsorted(hashes, last, side="right")
            # Arrow cannot join slices without rows.
            if end > start:
                parts.append(run.slice(start, end - start))
                marks_of_parts.append(marked[start:end])

        # Filtered before anything is copied.
        rows = pa.Table.from_batches(parts, ROW_SCHEMA)
        rows = judged(work, rows, np.concatenate(marks_of_parts))
        if only_rejected:
            rows = rows.filter(pc.is_valid(rows["reason"]))
        yield rows.combine_chunks().sort_by(STORED_ORDER)
