"""Plan which image goes into which shard: one process, all rows in memory.

Owns: labels, hold-out, the stored order, unique keys, the division into shards, the space needed.
Leaves out: columns and hashes of rows (`list_inputs`), what is wrong with the corpus as a whole
(`corpus_check`), writing shards (`write_shard`).
"""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_prep.formats.ledger import Outcomes
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
from data_prep.steps.list_inputs import check_input, hashed_key, left_out, list_units
from data_prep.steps.work import WorkFolder
from vitscale.config.errors import StorageError, UserError
from vitscale.data.index import NO_LABEL
from vitscale.data.tar_writer import SAMPLE_OVERHEAD
from vitscale.runs.data_prep import ShardSettings

ROWS = "rows.arrow"
REJECTED = "rejected.arrow"
# Images converted to estimate how much smaller re-encoding makes them.
RATIO_IMAGES = 256
# Columns of the rows that writing a shard needs.
PLANNED = "path class key label num_bytes file offset modified_ns spooled".split()

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
    units: list[str]
    """Shards as tars/SPLIT-NUMBER.arrow: batch i of rows.arrow has the rows of the i-th one."""
    num_rows: list[int]
    """Rows of each shard."""


def plan_shards(work: WorkFolder, unit: str) -> None:
    """Write rows.arrow with one batch per shard, and what is rejected already beside it."""
    source = work.run.source
    settings = work.run.labels
    rows = pa.concat_tables([work.table(name) for name in list_units(work)])
    rows, order = _ordered(rows)

    # A file that has several names would be stored several times.
    repeated = _marked(rows, repeated_files(rows, order, source=work.source))
    reasons = pc.if_else(repeated, "duplicate_path", rows["reason"])
    rows = with_column(rows, "reason", reasons)

    # Classes that are too small leave the corpus.
    census = take_census([rows])
    images_of = census.images
    least = source.min_images_per_class
    present = {name: num for name, num in images_of.items() if num >= least}
    small = pa.array(images_of.keys() - present, pa.string())
    in_small = pc.is_in(rows["class"], value_set=small)
    is_small = pc.and_(in_small, pc.is_null(rows["reason"]))
    rows = with_column(
        rows, "reason", pc.if_else(is_small, "small_class", rows["reason"])
    )

    # The corpus is checked as a whole before hours go into its shards.
    kept = pc.is_null(rows["reason"]).to_numpy()
    rejected = _rejected(work, rows, order[~kept[order]])
    listed = check_listed(work, census, rejected=rejected, num_left=len(present))
    are_values = open_source(source, settings).has_label_values
    check_classes(take_census([rows]), labels=settings, are_values=are_values)
    listed.check(
        max_bad_fraction=work.run.images.max_bad_fraction,
        num_images=len(rows) - len(rejected) + listed.num_images,
    )

    # A source that has splits of its own keeps them: no fraction of `train` is held out.
    train = np.flatnonzero(kept & pc.equal(rows["split"], TRAIN).to_numpy())
    has_splits = pc.any(pc.not_equal(rows["split"], TRAIN)).as_py()
    fraction = source.holdout_fraction
    if has_splits:
        fraction = 0.0
    class_of = rows["class"].dictionary_encode().combine_chunks().indices.fill_null(0)
    is_held_out = held_out(
        class_of.to_numpy()[train],
        rows["holdout"].to_numpy()[train],
        fraction=fraction,
        num=source.val_per_class,
    )
    moved = _marked(rows, train[is_held_out])
    split = pc.if_else(moved, source.holdout_split, rows["split"])

    # Classes and files have few values, whose bytes in one column could exceed 2 GiB.
    classes = load_labels(settings).label_map(present, keep_numbers=are_values)
    labels = pc.index_in(rows["class"], value_set=pa.array(classes, pa.string()))
    planned = with_column(rows, "label", labels.fill_null(NO_LABEL)).select(PLANNED)
    for name in ("class", "file"):
        planned = with_column(planned, name, planned[name].dictionary_encode())
    planned = planned.combine_chunks()

    units, positions = _divided(work, planned, order[kept[order]], split, listed)
    plan = Plan(
        classes=list(classes),
        present=sorted(present),
        units=units,
        num_rows=list(map(len, positions)),
    )

    # rows.arrow comes last: it says that this step is done.
    work.commit_table(REJECTED, rejected)
    temporary = work.temporary("rows")
    schema = planned.schema.with_metadata({"plan": json.dumps(plan._asdict())})
    with open(temporary, "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for shard_rows in positions:
            (batch,) = planned.take(shard_rows).combine_chunks().to_batches()
            writer.write_batch(batch.replace_schema_metadata(schema.metadata))
    work.commit(temporary, unit)


def with_column(rows: pa.Table, name: str, column: pa.ChunkedArray) -> pa.Table:
    """Replace or add a column."""
    if name not in rows.column_names:
        return rows.append_column(name, column)
    return rows.set_column(rows.column_names.index(name), name, column)


@lru_cache(maxsize=1)
def read_plan(work: WorkFolder) -> Plan:
    return Plan(**json.loads(work.table(ROWS).schema.metadata[b"plan"]))


def _ordered(rows: pa.Table) -> tuple[pa.Table, np.ndarray]:
    """Return (rows, their stored order), with unique keys.

    The order is that of the hashes, then of the paths.
    """
    columns = ("order_high", "order_low", "path")
    order = pc.sort_indices(rows, [(name, "ascending") for name in columns]).to_numpy()

    # Keys equal in lower case come from equal order hashes, or end in a hash already. They are few.
    high, low = (rows[name].to_numpy()[order] for name in columns[:2])
    same = np.flatnonzero((high[1:] == high[:-1]) & (low[1:] == low[:-1]))
    if not len(same):
        return rows, order
    neighbours = np.sort(order[np.union1d(same, same + 1)])
    samples = rows.select(["path", "split", "key"]).take(neighbours).to_pylist()

    # File systems that ignore case would make one member of two.
    names = [f"{row['split']}-{row['key'].lower()}" for row in samples]
    counts = Counter(names)
    for row, name in zip(samples, names, strict=True):
        if counts[name] > 1:
            row["key"] = hashed_key(row["key"], row["path"])
    keys = rows["key"].combine_chunks()
    unique = pa.array([row["key"] for row in samples], keys.type)
    keys = pc.replace_with_mask(keys, _marked(rows, neighbours), unique)
    # Order and rows are separate: sorting the rows would copy all of them.
    return with_column(rows, "key", keys), order


def _marked(rows: pa.Table, positions: np.ndarray) -> pa.Array:
    """True for the rows at some positions."""
    marks = np.zeros(len(rows), bool)
    marks[positions] = True
    return pa.array(marks)


def _rejected(work: WorkFolder, rows: pa.Table, positions: np.ndarray) -> pa.Table:
    """Make the outcomes of inputs that are rejected unread."""
    chosen = rows.select(["path", "split", "class", "reason"]).take(positions)
    paths = [printable(path) for path in chosen["path"].to_pylist()]
    copy_of = left_out(work.run.source.leave_out)
    copies = pa.array(map(copy_of.get, paths), pa.string())
    detail = pc.if_else(pc.equal(chosen["reason"], "left_out"), copies, None)
    chosen = with_column(
        with_column(chosen, "path", pa.array(paths, pa.string())), "detail", detail
    )
    return pa.concat_tables([OUTCOMES.empty_table(), chosen], promote_options="default")


def held_out(
    class_of: np.ndarray, hashes: np.ndarray, *, fraction: float, num: int | None
) -> np.ndarray:
    """Choose the rows of each class with the smallest hashes: `num`, or a fraction.

    Never a whole class.
    """
    # By class, and within a class by hash.
    order = np.lexsort((hashes, class_of))
    sizes = np.bincount(class_of)

    # The rank of each row within its class: its place in the order, less the rows before the class.
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order)) - (np.cumsum(sizes) - sizes)[class_of[order]]
    wanted = np.minimum(num or np.floor(fraction * sizes + 0.5), sizes - 1)
    is_chosen: np.ndarray = rank < wanted[class_of]
    return is_chosen


def _divided(
    work: WorkFolder,
    planned: pa.Table,
    order: np.ndarray,
    split: pa.ChunkedArray,
    listed: Outcomes,
) -> tuple[list[str], list[np.ndarray]]:
    """The names of the shards' tables, and the rows of each. Raises UserError."""
    run = work.run
    of_split: dict[str, np.ndarray] = {}
    for name in split.unique().to_pylist():
        in_split = order[pc.equal(split, name).to_numpy()[order]]
        if len(in_split):
            of_split[name] = in_split

    for name in run.source.splits:
        if name not in of_split:
            raise UserError(
                f"split {name!r} has no usable image\n{listed.describe()}".rstrip(),
                where=f"source.splits.{name}",
                next_step="fix these files, or remove the split",
            )

    # Files that will be rejected unread need no space, however large they are.
    sizes = planned.column("num_bytes").to_numpy()
    sizes = np.where(sizes <= MAX_FILE_BYTES, sizes, 0)
    ratio = 1.0
    if run.images.short_side:
        ratio = _size_ratio(work, planned.take(order[:RATIO_IMAGES]))

    units: list[str] = []
    parts: list[np.ndarray] = []
    needed = 0.0
    for name, rows in sorted(of_split.items()):
        num_bytes = ratio * int(sizes[rows].sum()) + SAMPLE_OVERHEAD * len(rows)
        num_shards = count_shards(
            len(rows), num_bytes=num_bytes, shards=run.shards, split=name
        )
        units += [f"tars/{name}-{number:06d}.arrow" for number in range(num_shards)]
        # As equal as possible: readers take turns over shards.
        parts += np.array_split(rows, num_shards)
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
    return units, parts


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


def _size_ratio(work: WorkFolder, rows: pa.Table) -> float:
    """Bytes stored per byte read."""
    # Images that are rejected take no space, and so do not count.
    pairs = [(row["num_bytes"], check_input(work, row)) for row in rows.to_pylist()]
    before = sum(num_bytes for num_bytes, image in pairs if image.reason is None)
    if before:
        return sum(len(image.content) for _, image in pairs) / before
    return 1.0
