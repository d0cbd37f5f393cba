"""Plan which image goes into which shard: one process, in passes over the rows that were listed.

Owns: labels, hold-out, unique keys, the division into shards, the space needed.
Leaves out: columns and hashes of rows (`list_inputs`), their stored order (`listed_rows`), what is
wrong with the corpus as a whole (`corpus_check`), writing shards (`write_shard`).

A pass reads a few columns, and what it decides is a mark of a byte a row. The last one sorts,
bucket by bucket. In memory are the marks, a bucket, and the rows of one shard of each split.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, repeat
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_prep.duplicates.equal import PASS_ROWS
from data_prep.formats.ledger import Outcomes, regrouped
from data_prep.images.check import MAX_FILE_BYTES
from data_prep.sources.protocol import open_source, printable
from data_prep.steps.corpus_check import (
    TRAIN,
    check_classes,
    check_listed,
    repeated_files,
    take_census,
)
from data_prep.steps.labels import load_labels
from data_prep.steps.list_inputs import ROW_SCHEMA, check_input, hashed_key, left_out
from data_prep.steps.listed_rows import (
    DUPLICATE,
    HELD_OUT,
    NUM_HASHES,
    SMALL,
    judged,
    marked_runs,
    read_runs,
    stored_rows,
    with_column,
)
from data_prep.steps.work import WorkFolder
from vitscale.config.errors import StorageError, UserError
from vitscale.data.index import NO_LABEL
from vitscale.data.tar_writer import SAMPLE_OVERHEAD
from vitscale.distributed.atomic_files import write_json
from vitscale.runs.data_prep import ShardSettings

PLAN = "plan.json"
ROWS = "rows.arrow"
REJECTED = "rejected.arrow"
# Images converted to estimate how much smaller re-encoding makes them.
RATIO_IMAGES = 256
# Columns of the rows that writing a shard needs.
PLANNED = pa.schema(
    [
        pa.field("label", pa.int32()) if name == "label" else ROW_SCHEMA.field(name)
        for name in "path class key label num_bytes file offset modified_ns spooled".split()
    ]
)
# Rows of a batch of REJECTED, on which the bytes of the ledger depend: those of one row group.
REJECTED_ROWS = 1 << 20

# Rows of the ledger; those without a reason are also rows of the index.
TYPES = dict(
    line.split()
    for line in """\
    path string
    split string
    class string
    reason string
    changes string
    detail string
    key string
    offset int64
    length int64
    format string
    width int32
    height int32""".splitlines()
)
HASHES = dict.fromkeys(("input_hash", "blake3"), pa.binary(32))
OUTCOMES = pa.schema(TYPES | HASHES)


class Plan(NamedTuple):
    """Decisions for the whole corpus; the rows of the shards are stored separately."""

    classes: list[str]
    """Class names in label order; empty if classes are ignored."""
    present: list[str]
    """Classes that have images."""
    shards: dict[str, tuple[int, int]]
    """Unit tars/SPLIT-NUMBER.arrow -> (the batch of rows.arrow with its rows, number of rows)."""

    @property
    def units(self) -> list[str]:
        return list(self.shards)

    @property
    def num_rows(self) -> list[int]:
        return [num for _, num in self.shards.values()]


def plan_shards(work: WorkFolder, unit: str) -> None:
    """Write rows.arrow with one batch per shard, what is rejected already, and the plan."""
    source = work.run.source
    settings = work.run.labels
    marks = np.zeros(sum(map(len, read_runs(work))), np.uint8)

    # A file that has several names would be stored several times.
    for places in repeated_files(work, num_rows=len(marks)):
        marks[places] = DUPLICATE

    # Classes that are too small leave the corpus.
    census = take_census(_all_rows(work, marks))
    images_of = census.images
    least = source.min_images_per_class
    present = {name: num for name, num in images_of.items() if num >= least}
    small = pa.array(images_of.keys() - present, pa.large_string())
    if len(small):
        for run, marked in marked_runs(work, marks):
            in_small = pc.is_in(run["class"], value_set=small)
            is_usable = pc.is_null(judged(work, run, marked)["reason"])
            marked[pc.and_(is_usable, in_small).to_numpy()] = SMALL

    # The corpus is checked as a whole before hours go into its shards.
    rejected = stored_rows(work, marks, only_rejected=True)
    outcomes = (_rejected(work, rows) for rows in rejected)
    work.commit_tables(REJECTED, OUTCOMES, regrouped(outcomes, REJECTED_ROWS))
    listed = check_listed(
        work, census, rejected=work.table(REJECTED), num_left=len(present)
    )
    are_values = open_source(source, settings).has_label_values
    left = take_census(_all_rows(work, marks))
    check_classes(left, labels=settings, are_values=are_values)
    listed.check(
        max_bad_fraction=work.run.images.max_bad_fraction,
        num_images=len(marks) - listed.num_rows + listed.num_images,
    )

    # A source that has splits of its own keeps them: no fraction of `train` is held out.
    is_train = (pc.equal(run["split"], TRAIN) for run in read_runs(work))
    fraction = source.holdout_fraction
    if not all(pc.all(each).as_py() for each in is_train):
        fraction = 0.0
    _mark_held_out(
        work,
        marks,
        left.counts.get(TRAIN, Counter()),
        fraction=fraction,
        num=source.val_per_class,
    )

    sizes = _divide(work, marks, listed)
    classes = load_labels(settings).label_map(present, keep_numbers=are_values)
    shards: dict[str, tuple[int, int]] = {}
    numbers = Counter[str]()

    def tables() -> Iterator[pa.Table]:
        # Shards are written as they fill, those of all splits in one file.
        kept = _kept_rows(work, marks, classes)
        for split, rows in _divided(kept, sizes):
            name = f"tars/{split}-{numbers[split]:06d}.arrow"
            shards[name] = (len(shards), len(rows))
            numbers[split] += 1
            yield rows

    work.commit_tables(ROWS, PLANNED, tables())
    # The plan comes last: it says that this step is done.
    plan = Plan(
        classes=list(classes),
        present=sorted(present),
        shards=dict(sorted(shards.items(), key=_place)),
    )
    write_json(work.path / unit, plan._asdict())


def _place(shard: tuple[str, object]) -> tuple[str, int, str]:
    """By split, then by number; a number above 999,999 is longer."""
    unit, _ = shard
    return unit.rpartition("-")[0], len(unit), unit


def _all_rows(work: WorkFolder, marks: np.ndarray) -> Iterator[pa.Table]:
    return (judged(work, run, marked) for run, marked in marked_runs(work, marks))


@lru_cache(maxsize=1)
def read_plan(work: WorkFolder) -> Plan:
    return Plan(**json.loads((work.path / PLAN).read_text()))


def with_unique_keys(rows: pa.Table) -> pa.Table:
    """Put hashes to keys that are equal in lower case. rows: all of a range of the stored order."""
    # Such keys come from equal order hashes, or end in a hash already. They are few.
    high, low = (rows[name].to_numpy() for name in ("order_high", "order_low"))
    same = np.flatnonzero((high[1:] == high[:-1]) & (low[1:] == low[:-1]))
    if not len(same):
        return rows
    places = np.union1d(same, same + 1)
    near = rows.select(["path", "order_high", "key"]).take(places)

    # File systems that ignore case would make one member of two.
    lower = pc.ascii_lower(near["key"].cast(pa.string()))
    names = pc.binary_join_element_wise(
        near["order_high"].cast(pa.string()), lower, "-"
    )
    counts = names.value_counts()
    again = counts.field("values").filter(pc.greater(counts.field("counts"), 1))
    is_again = pc.is_in(names, value_set=again)
    chosen = near.filter(is_again)
    pairs = zip(chosen["key"].to_pylist(), chosen["path"].to_pylist(), strict=True)
    keys = rows["key"].combine_chunks()
    unique = pa.array([hashed_key(key, path) for key, path in pairs], keys.type)
    mask = np.zeros(len(rows), bool)
    mask[places[is_again.to_numpy()]] = True
    return with_column(rows, "key", pc.replace_with_mask(keys, pa.array(mask), unique))


def _rejected(work: WorkFolder, rows: pa.Table) -> pa.Table:
    """Make the outcomes of inputs that are rejected unread."""
    paths = [printable(path) for path in rows["path"].to_pylist()]
    copy_of = left_out(work.run.source.leave_out)
    copies = pa.array(map(copy_of.get, paths), pa.string())
    is_left_out = pc.equal(rows["reason"], "left_out")
    made = {
        "path": pa.array(paths, pa.string()),
        "split": rows["split"],
        "class": rows["class"].cast(pa.string()),
        "reason": rows["reason"],
        "detail": pc.if_else(is_left_out, copies, None),
    }
    return pa.concat_tables(
        [OUTCOMES.empty_table(), pa.table(made)], promote_options="default"
    )


def _mark_held_out(
    work: WorkFolder,
    marks: np.ndarray,
    images: Mapping[str, int],
    *,
    fraction: float,
    num: int | None,
) -> None:
    """Hold out the rows of each class with the smallest hashes: `num`, or a fraction.

    images: class -> usable rows of `train`. Never a whole class.
    """
    classes = pa.array(images, pa.large_string())
    sizes = np.array([*images.values()], np.int64)
    wanted = np.minimum(num or np.floor(fraction * sizes + 0.5), sizes - 1)

    # From the smallest hashes upwards, until each class has enough.
    num_parts = len(marks) // PASS_ROWS + 1
    for part in range(num_parts):
        if not (wanted > 0).any():
            return
        first = np.uint64(part * NUM_HASHES // num_parts)
        last = np.uint64((part + 1) * NUM_HASHES // num_parts - 1)
        found = []
        start = 0
        for run, marked in marked_runs(work, marks):
            hashes = run["holdout"].to_numpy()
            places = np.flatnonzero((hashes >= first) & (hashes <= last))
            rows = run.select(["holdout", "class", "split", "reason"]).take(places)
            rows = judged(work, rows, marked[places])
            is_usable = pc.and_(
                pc.is_null(rows["reason"]), pc.equal(rows["split"], TRAIN)
            )
            columns = {
                "class": pc.index_in(rows["class"], value_set=classes),
                "holdout": rows["holdout"],
                "place": pa.array(places + start),
            }
            found.append(pa.table(columns).filter(is_usable))
            start += len(run)
        rows = pa.concat_tables(found)
        class_of = rows["class"].to_numpy()
        is_chosen = held_out(class_of, rows["holdout"].to_numpy(), wanted=wanted)
        marks[rows["place"].to_numpy()[is_chosen]] = HELD_OUT
        wanted = wanted - np.bincount(class_of, minlength=len(sizes))


def held_out(
    class_of: np.ndarray, hashes: np.ndarray, *, wanted: np.ndarray
) -> np.ndarray:
    """Choose the rows of each class with the smallest hashes. wanted: how many of each class."""
    # By class, and within a class by hash.
    order = np.lexsort((hashes, class_of))
    sizes = np.bincount(class_of)

    # The rank of each row within its class: its place in the order, less the rows before the class.
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order)) - (np.cumsum(sizes) - sizes)[class_of[order]]
    is_chosen: np.ndarray = rank < wanted[class_of]
    return is_chosen


def _kept_rows(
    work: WorkFolder, marks: np.ndarray, classes: Sequence[str]
) -> Iterator[tuple[str, pa.Table]]:
    """Yield (split, what writing a shard needs of some of its rows), each split in stored order."""
    label_of = pa.array(classes, pa.large_string())
    for rows in stored_rows(work, marks):
        # Rejected rows count for the keys of others.
        rows = with_unique_keys(rows)
        rows = rows.filter(pc.is_null(rows["reason"]))
        labels = pc.index_in(rows["class"], value_set=label_of)
        rows = with_column(rows, "label", labels.fill_null(NO_LABEL))
        for split in rows["split"].unique().to_pylist():
            in_split = pc.equal(rows["split"], split)
            yield split, rows.select(PLANNED.names).filter(in_split)


def _divided(
    parts: Iterable[tuple[str, pa.Table]], sizes: Mapping[str, Iterator[int]]
) -> Iterator[tuple[str, pa.Table]]:
    """Divide the rows of each name into tables of the sizes given for it."""
    waiting: dict[str, pa.Table] = {}
    wanted = {name: next(nums) for name, nums in sizes.items()}
    for name, rows in parts:
        rows = pa.concat_tables([waiting.pop(name, rows[:0]), rows])
        while len(rows) >= wanted[name]:
            yield name, rows.slice(0, wanted[name])
            rows = rows.slice(wanted[name])
            wanted[name] = next(sizes[name], sys.maxsize)
        waiting[name] = rows


def _divide(
    work: WorkFolder, marks: np.ndarray, listed: Outcomes
) -> dict[str, Iterator[int]]:
    """Return the rows of each shard of each split. Raises UserError."""
    run = work.run
    nums = Counter[str]()
    sizes = Counter[str]()
    for rows in _all_rows(work, marks):
        # Files that will be rejected unread need no space, however large they are.
        is_read = pc.less_equal(rows["num_bytes"], MAX_FILE_BYTES)
        rows = with_column(rows, "size", pc.if_else(is_read, rows["num_bytes"], 0))
        kept = rows.select(["split", "size"]).filter(pc.is_null(rows["reason"]))
        groups = kept.group_by("split").aggregate([("size", "sum"), ([], "count_all")])
        for group in groups.to_pylist():
            nums[group["split"]] += group["count_all"]
            sizes[group["split"]] += group["size_sum"]

    for name in run.source.splits:
        if name not in nums:
            raise UserError(
                f"split {name!r} has no usable image\n{listed.describe()}".rstrip(),
                where=f"source.splits.{name}",
                next_step="fix these files, or remove the split",
            )
    ratio = 1.0
    if run.images.short_side:
        ratio = _size_ratio(work, marks)

    num_rows: dict[str, Iterator[int]] = {}
    needed = 0.0
    for name, num in sorted(nums.items()):
        num_bytes = ratio * sizes[name] + SAMPLE_OVERHEAD * num
        num_shards = count_shards(
            num, num_bytes=num_bytes, shards=run.shards, split=name
        )
        # As equal as possible: readers take turns over shards.
        least, more = divmod(num, num_shards)
        num_rows[name] = chain(
            repeat(least + 1, more), repeat(least, num_shards - more)
        )
        needed += num_bytes

    # The disk is checked now, and not when it is full after hours.
    free = shutil.disk_usage(work.path).free
    if free < needed:
        raise StorageError(
            f"{free >> 20} MiB are free, {max(1, int(needed) >> 20)} MiB are needed; "
            f"the work done so far is kept in {work.path.name}",
            where=work.output,
            next_step="free space and run the same command again; or remove that folder and choose "
            "another output",
        )
    return num_rows


def count_shards(
    num_images: int, *, num_bytes: float, shards: ShardSettings, split: str
) -> int:
    """The number of shards of a split. Raises UserError if it has too few images."""
    if num_images < shards.min_shards:
        raise UserError(
            f"{shards.min_shards} shards cannot be filled from {num_images} images "
            f"of split {split!r}",
            where="shards.min_shards",
            allowed=f"at most {num_images}",
        )

    shard_bytes = max(1, int(shards.shard_mib * 2**20))
    num_full = math.ceil(int(num_bytes) / shard_bytes)
    return min(max(shards.min_shards, num_full), num_images)


def _size_ratio(work: WorkFolder, marks: np.ndarray) -> float:
    """Bytes stored per byte read."""
    rows: list[dict[str, Any]] = []
    for bucket in stored_rows(work, marks):
        kept = bucket.filter(pc.is_null(bucket["reason"]))
        rows += kept.slice(0, RATIO_IMAGES - len(rows)).to_pylist()
        if len(rows) == RATIO_IMAGES:
            break
    # Images that are rejected take no space, and so do not count.
    pairs = [(row["num_bytes"], check_input(work, row)) for row in rows]
    before = sum(num_bytes for num_bytes, image in pairs if image.reason is None)
    if before:
        return sum(len(image.content) for _, image in pairs) / before
    return 1.0
