"""Plan which image goes into which shard: one process, all rows in memory.

Owns: classes and labels, hold-out, the stored order, unique keys, the division into shards, the
space needed.
Leaves out: columns and hashes of rows (`rows`), writing shards (`write_shard`).
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_prep.formats.ledger import Outcomes
from data_prep.formats.tar_writer import SAMPLE_OVERHEAD
from data_prep.images.check import MAX_FILE_BYTES
from data_prep.sources.protocol import Outage, printable
from data_prep.sources.registry import open_source
from data_prep.steps.labels import load_labels
from data_prep.steps.list_inputs import InputReader, left_out, list_units, read_containers
from data_prep.steps.rows import (
    commit_file,
    commit_table,
    equal_neighbours,
    hashed_key,
    read_table,
    shard_order,
)
from data_prep.steps.work import WorkFolder
from vitscale.config.errors import UserError
from vitscale.data.index import NO_LABEL
from vitscale.runs.data_prep import ShardSettings

ROWS, REJECTED = "rows.arrow", "rejected.arrow"
TRAIN = "train"
CLASSES_SHOWN = 10
# Index, ledger and manifest, per sample; measured 60-120 bytes.
SIDE_FILE_BYTES = 256
# Images converted to estimate how much smaller re-encoding makes them.
RATIO_IMAGES = 256
# What writing a shard needs of its rows.
PLANNED = ("path", "class", "key", "label", "num_bytes", "file", "offset", "modified_ns", "spooled")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is decided for the whole corpus, beside the rows of each shard."""

    num_images: int
    """Inputs without hidden files and other names."""
    num_bad: int
    """Inputs that listing rejected as faulty."""
    classes: tuple[str, ...]
    """In label order; none if they are ignored."""
    present: tuple[str, ...]
    """Classes with images; labels that the source itself skips never had one."""
    shards: tuple[tuple[str, int, int], ...]
    """(split, number, images): batch i of rows.arrow has the rows of shard i."""

    @cached_property
    def units(self) -> list[str]:
        return [f"tars/{split}-{number:06d}.arrow" for split, number, _ in self.shards]


class Codes:
    """A column of few different values as numbers; -1 stands for null."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        encoded = column.dictionary_encode().unify_dictionaries()
        parts = [chunk.indices.fill_null(-1).to_numpy() for chunk in encoded.chunks]
        self.codes = np.concatenate([np.zeros(0, np.int32), *parts])
        self.values: list[Any] = encoded.chunk(0).dictionary.to_pylist() if parts else []

    def code_of(self, value: str) -> int:
        if value not in self.values:
            self.values.append(value)
        return self.values.index(value)

    def counts(self, rows: np.ndarray) -> dict[str, int]:
        """Rows of each value among those of a mask, without values that have none."""
        codes = self.codes[rows]
        counts = np.bincount(codes[codes >= 0], minlength=len(self.values)).tolist()
        return {value: num for value, num in zip(self.values, counts, strict=True) if num}

    def array(self, type_: pa.DataType) -> pa.Array:
        indices = pa.array(self.codes, mask=self.codes < 0)
        return pa.DictionaryArray.from_arrays(indices, pa.array(self.values, type_))


def plan_units(work: WorkFolder) -> list[str]:
    return [ROWS]


def plan_shards(work: WorkFolder, unit: str) -> None:
    """Write rows.arrow with one batch per shard, and what is rejected already beside it."""
    source = work.run.source
    rows = pa.concat_tables([read_table(work.path / name) for name in list_units(work)])
    reason, split, class_name, file = (
        Codes(rows.column(name)) for name in ("reason", "split", "class", "file")
    )
    order, keys = _ordered(rows, reason)
    found = class_name.counts(reason.codes < 0)
    unknown = class_name.counts(reason.codes == reason.code_of("unknown_class"))
    small = sorted(name for name, num in found.items() if num < source.min_images_per_class)
    is_small = np.isin(class_name.codes, [class_name.code_of(name) for name in small])
    reason.codes[is_small & (reason.codes < 0)] = reason.code_of("small_class")
    kept = reason.codes < 0
    rejected = _rejected_table(rows, order[~kept[order]], reason, split, class_name)
    listed = Outcomes()
    listed.add(rejected)
    present = {name: num for name, num in found.items() if name not in set(small)}
    _check_classes(work, found, present, unknown=unknown, listed=listed)
    classes = load_labels(work.run.labels).label_map(
        present, keep_numbers=open_source(source, work.run.labels).has_label_values
    )
    train = np.flatnonzero(kept & (split.codes == split.code_of(TRAIN)))
    num_train = np.bincount(class_name.codes[train], minlength=len(class_name.values))
    has_splits = any(box.split != TRAIN for box in read_containers(work))
    fraction = 0 if has_splits else source.holdout_fraction
    wanted = source.val_per_class or np.floor(fraction * num_train + 0.5)
    taken = held_out(
        class_name.codes[train],
        rows.column("holdout").to_numpy()[train],
        num_per_class=np.minimum(wanted, num_train - 1),  # never a whole class
    )
    split.codes[train[taken]] = split.code_of(source.holdout_split)
    label_of = {name: label for label, name in reversed(list(enumerate(classes)))}
    labels = np.array([label_of.get(name, NO_LABEL) for name in class_name.values], np.int32)
    made = {
        "class": class_name.array(pa.string()),
        "file": file.array(pa.binary()),
        "key": keys,
        "label": pa.array(labels[class_name.codes] if len(labels) else class_name.codes),
    }
    columns = [made.get(name) or rows.column(name) for name in PLANNED]
    planned = pa.table(columns, names=PLANNED).combine_chunks()
    shards, positions = _divided(work, planned, order[kept[order]], split, listed)
    plan = Plan(
        num_images=len(rows) - listed.num_rows + listed.num_images,
        num_bad=listed.num_bad,
        classes=classes,
        present=tuple(sorted(present)),
        shards=tuple(shards),
    )
    commit_table(work.temporary("rejected"), work.path / REJECTED, rejected)
    temporary = work.temporary("rows")
    schema = planned.schema.with_metadata({"plan": json.dumps(asdict(plan))})
    with open(temporary, "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for chosen in positions:
            (batch,) = planned.take(chosen).combine_chunks().to_batches()
            writer.write_batch(batch.replace_schema_metadata(schema.metadata))
    commit_file(temporary, work.path / unit)


@lru_cache(maxsize=1)
def read_plan(work: WorkFolder) -> Plan:
    with pa.memory_map(str(work.path / ROWS)) as source:
        stored = json.loads(pa.ipc.open_file(source).schema.metadata[b"plan"])
    tuples = {name: tuple(stored[name]) for name in ("classes", "present")}
    return Plan(**{**stored, **tuples, "shards": tuple(map(tuple, stored["shards"]))})


def _ordered(rows: pa.Table, reason: Codes) -> tuple[np.ndarray, pa.Array]:
    """(rows in stored order, their keys, made unique). Rejects inputs listed twice."""
    order, keys = shard_order(rows), rows.column("key").combine_chunks()
    equal = order[equal_neighbours(rows, order)]
    if not len(equal):
        return order, keys
    found = rows.take(equal).select(["path", "split", "key"]).to_pylist()
    for position, before, row in zip(equal[1:], found, found[1:], strict=False):
        if row["path"] == before["path"] and reason.codes[position] < 0:
            reason.codes[position] = reason.code_of("duplicate_path")
    # Keys equal in lower case come from equal order hashes, or end in a hash already.
    names = [f"{row['split']}-{row['key'].lower()}" for row in found]
    counts = Counter(names)
    changed = {
        position: hashed_key(row["key"], row["path"])
        for position, row, name in zip(equal.tolist(), found, names, strict=True)
        if counts[name] > 1
    }
    mask = np.zeros(len(rows), bool)
    mask[list(changed)] = True
    new = pa.array([changed[i] for i in sorted(changed)], keys.type)
    return order, pc.replace_with_mask(keys, mask, new)


def _rejected_table(
    rows: pa.Table, positions: np.ndarray, reason: Codes, split: Codes, class_name: Codes
) -> pa.Table:
    """The ledger's rows of inputs that are rejected unread."""
    paths = [printable(path) for path in rows.column("path").take(positions).to_pylist()]
    columns = {
        name: codes.array(pa.string()).take(positions)
        for name, codes in (("split", split), ("class", class_name), ("reason", reason))
    }
    return pa.table({"path": pa.array(paths, pa.string()), **columns})


def _check_classes(
    work: WorkFolder,
    found: Mapping[str, int],
    present: Mapping[str, int],
    *,
    unknown: Mapping[str, int],
    listed: Outcomes,
) -> None:
    """Raise UserError for unknown classes, classes without images, and no images at all."""
    run, labels = work.run, load_labels(work.run.labels)
    if run.labels.unknown == "refuse":
        labels.check(unknown, found=found)
    named = {box.class_name for box in read_containers(work)} - {None}
    empty = sorted(map(str, named - found.keys()))
    ignored = run.labels.values == "none" or labels.map or labels.space
    where, what, advice = "source.path", "", ""
    if empty and not ignored and (found or not listed.reasons):
        shown = ", ".join(map(repr, empty[:CLASSES_SHOWN]))
        what = f"{len(empty)} of {len(named)} classes hold no images: {shown}"
        advice = "remove these classes, or add their images"  # or labels would shift
    elif not found and not listed.reasons:
        what, advice = "is empty", "check the source"
    elif not found:
        num = sum(listed.reasons.values())
        what = f"no images were found: all {num:,} inputs are rejected\n{listed.describe()}"
        advice = "fix these names, paths, labels or files, or choose another source"
    elif left_out(run.source.leave_out) and not listed.reasons["left_out"]:
        where, what = "source.leave_out", f"{run.source.leave_out!r} names no image of the source"
        advice = "take the file that find_duplicates.py wrote for shards of this source"
    elif not present:
        where, what = "source.min_images_per_class", "no class is left"
        advice = "check the source, or lower source.min_images_per_class"
    if what:
        raise UserError(what, where=where, next_step=advice)


def held_out(class_of: np.ndarray, hashes: np.ndarray, *, num_per_class: np.ndarray) -> np.ndarray:
    """Whether each row is among the `num_per_class` of its class with the smallest hashes."""
    order = np.lexsort((hashes, class_of))
    starts = np.searchsorted(class_of[order], np.arange(len(num_per_class)))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order)) - starts[class_of[order]]
    taken: np.ndarray = place < num_per_class[class_of]
    return taken


def _divided(
    work: WorkFolder, planned: pa.Table, order: np.ndarray, split: Codes, listed: Outcomes
) -> tuple[list[tuple[str, int, int]], Iterator[np.ndarray]]:
    """The shards as (split, number, images), and the rows of each. Raises UserError."""
    run = work.run
    of_split = {name: order[split.codes[order] == code] for code, name in enumerate(split.values)}
    for name in run.source.splits:
        if not len(of_split.get(name, ())):
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
    shards, parts, needed = [], [], 0.0
    for name, rows in sorted(of_split.items()):
        if not len(rows):
            continue
        total = ratio * int(sizes[rows].sum()) + SAMPLE_OVERHEAD * len(rows)
        lengths = shard_lengths(len(rows), num_bytes=total, shards=run.shards, split=name)
        shards += [(name, number, length) for number, length in enumerate(lengths)]
        parts.append(np.split(rows, np.cumsum(lengths)[:-1]))
        needed += total + SIDE_FILE_BYTES * len(rows)
    free = shutil.disk_usage(work.path).free
    if free < needed:
        raise Outage(
            f"{int(free) >> 20} MiB are free, {max(1, int(needed) >> 20)} MiB are needed; "
            f"the work done so far is kept in {work.path.name}",
            where=str(work.output),
            next_step="free space and run the same command again; or remove that folder and choose "
            "another output",
        )
    return shards, (rows for part in parts for rows in part)


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


def _size_ratio(work: WorkFolder, rows: pa.Table) -> float:
    """Bytes stored per byte read."""
    reader = InputReader.of(work)
    pairs = [(row["num_bytes"], reader.check(row)) for row in rows.to_pylist()]
    before = sum(num_bytes for num_bytes, image in pairs if image.reason is None)
    return sum(len(image.content) for _, image in pairs) / before if before else 1.0
