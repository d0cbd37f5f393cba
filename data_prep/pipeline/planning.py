"""Plan which images go into which shard.

Owns: the split and label of every row, the division of each split into shards of equal numbers of
samples, and the space needed.
Leaves out: writing them (`shard_writing`).

The stored order of a split is the order of its rows over all buckets. A shard is an interval of it,
so a worker finds a shard's rows from each bucket's counts.
"""

from __future__ import annotations

import bisect
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data_prep.images.check import MAX_FILE_BYTES
from data_prep.pipeline.image_reading import validate_input
from data_prep.pipeline.listing import bucket_path
from data_prep.pipeline.rejections import rejected_so_far
from data_prep.pipeline.row_tables import read_table, write_table
from data_prep.pipeline.selection import TRAIN
from data_prep.pipeline.workspace import Preparation, row_locations
from data_prep.shards.ledger import describe_rejected
from data_prep.shards.tar_writer import SAMPLE_OVERHEAD
from data_prep.sources.outages import Interrupted
from data_prep.sources.protocol import NO_CLASS
from vitscale.config.errors import UserError
from vitscale.data.index import NO_LABEL
from vitscale.runs.data_prep import ShardSettings

# Index, ledger and manifest, per sample; measured 60-120 bytes.
SIDE_FILE_BYTES = 256
# Images converted to estimate how much smaller re-encoding makes them.
RATIO_IMAGES = 256


def assignments_path(p: Preparation, number: int) -> Path:
    return p.path("assignments", f"{number:06d}.arrow")


def assign_splits(p: Preparation, unit: str) -> None:
    """Assign reason, split and label to every row of one bucket, and sum them for the plan."""
    number = int(unit.rpartition("-")[2])
    rows = read_table(bucket_path(p, number))
    reasons = rows.column("reason").to_pylist()
    selection: dict[str, Any] = p.result("selection")
    label_of = {name: label for label, name in reversed(list(enumerate(selection["classes"])))}
    label_of = label_of or {NO_CLASS: NO_LABEL}
    small, limits = set(selection["small"]), selection["thresholds"]
    classes, splits = rows.column("class").to_pylist(), rows.column("split").to_pylist()
    hashes = rows.column("holdout").to_pylist()
    labels: list[int | None] = [None] * len(rows)
    for i, name in enumerate(classes):
        if reasons[i] is None and name in small:
            reasons[i] = "small_class"
        if reasons[i] is None:
            labels[i] = label_of[name]
            if splits[i] == TRAIN and name in limits and hashes[i] <= limits[name]:
                splits[i] = p.run.source.holdout_split
    table = pa.table(
        {
            "reason": pa.array(reasons, pa.string()),
            "split": pa.array(splits, pa.string()),
            "label": pa.array(labels, pa.int32()),
        }
    )
    write_table(table, assignments_path(p, number), temporary=p.work.temporary("assignments"))
    # Files that will be rejected unread need no space, however large they are.
    sizes = [n if n <= MAX_FILE_BYTES else 0 for n in rows.column("num_bytes").to_pylist()]
    p.put_result(unit, _sums(splits, reasons, sizes))


def _sums(splits: list[str], reasons: list[str | None], sizes: list[int]) -> dict[str, list[int]]:
    """Split -> [images to write, their bytes]."""
    sums: dict[str, list[int]] = {}
    for split, reason, num_bytes in zip(splits, reasons, sizes, strict=True):
        if reason is None:
            entry = sums.setdefault(split, [0, 0])
            entry[0] += 1
            entry[1] += num_bytes
    return sums


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitPlan:
    """One split's shards."""

    shard_lengths: tuple[int, ...]
    bucket_starts: tuple[int, ...]
    """Position in the split of each bucket's first image; one entry more than buckets."""

    @property
    def num_images(self) -> int:
        return self.bucket_starts[-1]


def make_plan(p: Preparation, unit: str) -> None:
    num_buckets = p.result("buckets")
    sums = [p.result(f"assignment-{number:06d}") for number in range(num_buckets)]
    _check_splits(p, sums)
    ratio = _size_ratio(p) if p.run.images.short_side else 1.0
    plan, needed = {}, 0.0
    for split in sorted(set().union(*sums)):
        counts = [bucket.get(split, [0, 0])[0] for bucket in sums]
        image_bytes = ratio * sum(bucket.get(split, [0, 0])[1] for bucket in sums)
        total = image_bytes + SAMPLE_OVERHEAD * sum(counts)
        lengths = shard_lengths(sum(counts), num_bytes=total, shards=p.run.shards, split=split)
        plan[split] = [lengths, [0, *accumulate(counts)]]
        needed += total + SIDE_FILE_BYTES * sum(counts)
    free = shutil.disk_usage(p.work.path).free
    if free < needed:
        raise Interrupted(
            f"{int(free) >> 20} MiB are free, {max(1, int(needed) >> 20)} MiB are needed; "
            f"the work done so far is kept in {p.work.path.name}",
            where=str(p.output),
            next_step="free space and run the same command again; or remove that folder and choose "
            "another output",
        )
    p.put_result(unit, plan)


def _check_splits(p: Preparation, sums: Sequence[dict[str, list[int]]]) -> None:
    """Raise UserError if a split of the settings has no image, as when its one table is damaged."""
    filled = {split for bucket in sums for split, (num_images, _) in bucket.items() if num_images}
    empty = [split for split in p.run.source.splits if split not in filled]
    if empty:
        rejected = rejected_so_far(p)
        shown = describe_rejected(rejected.reasons, rejected.examples)
        raise UserError(
            f"split {empty[0]!r} has no usable image" + (f"\n{shown}" if shown else ""),
            where=f"source.splits.{empty[0]}",
            next_step="fix these files, or remove the split",
        )


def shard_lengths(
    num_images: int, *, num_bytes: float, shards: ShardSettings, split: str
) -> list[int]:
    """Samples per shard, as equal as possible: readers take turns over shards."""
    if num_images < shards.min_shards:
        raise UserError(
            f"{shards.min_shards} shards cannot be filled from {num_images} images "
            f"of split {split!r}",
            where="shards.min_shards",
            allowed=f"at most {num_images}",
        )
    num_shards = max(shards.min_shards, -(-int(num_bytes) // int(shards.shard_mib * 2**20)))
    num_shards = min(num_shards, num_images)
    share, rest = divmod(num_images, num_shards)
    return [share + (i < rest) for i in range(num_shards)]


def _size_ratio(p: Preparation) -> float:
    """Bytes stored per byte read, from the first images of the first bucket."""
    rows, assignments = read_table(bucket_path(p, 0)), read_table(assignments_path(p, 0))
    accepted = [i for i, r in enumerate(assignments.column("reason").to_pylist()) if r is None]
    before = after = 0
    for location in row_locations(rows.take(np.array(accepted[:RATIO_IMAGES], np.int64))):
        result = validate_input(p, location)
        if result.reason is None:
            before += location.num_bytes
            after += len(result.content)
    return after / before if before else 1.0


def read_plan(p: Preparation) -> dict[str, SplitPlan]:
    return {
        split: SplitPlan(shard_lengths=tuple(lengths), bucket_starts=tuple(starts))
        for split, (lengths, starts) in p.result("plan").items()
    }


def rows_of_shard(
    p: Preparation, plan: SplitPlan, split: str, number: int
) -> Iterator[tuple[pa.Table, Sequence[int]]]:
    """(rows, labels) of one shard in stored order, one pair per bucket."""
    start = sum(plan.shard_lengths[:number])
    stop = start + plan.shard_lengths[number]
    bucket = bisect.bisect_right(plan.bucket_starts, start) - 1
    while start < stop:
        first = start - plan.bucket_starts[bucket]
        last = min(stop, plan.bucket_starts[bucket + 1]) - plan.bucket_starts[bucket]
        if first < last:
            assignments = read_table(assignments_path(p, bucket))
            reasons, splits = (
                assignments.column("reason").to_pylist(),
                assignments.column("split").to_pylist(),
            )
            members = [i for i, s in enumerate(splits) if s == split and reasons[i] is None]
            chosen = np.array(members[first:last], np.int64)
            labels = assignments.column("label").to_numpy()[chosen].astype(np.int64).tolist()
            yield read_table(bucket_path(p, bucket)).take(chosen), labels
        start += last - first
        bucket += 1
