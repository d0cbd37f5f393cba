"""Write one shard: a tar on disk, and a table with the outcome of each of its rows.

Owns: the unit of work that reads, validates and stores images.
Leaves out: the layout of the tar (`shards.tar_writer`), files over all shards (`finishing`).
"""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa

from data_prep.images.check import ValidationResult
from data_prep.pipeline.image_reading import validate_input
from data_prep.pipeline.planning import SplitPlan, read_plan, rows_of_shard
from data_prep.pipeline.rejections import Rejections, check_so_far
from data_prep.pipeline.row_tables import write_table
from data_prep.pipeline.workspace import Preparation, row_locations
from data_prep.shards.ledger import EXTERNAL_REASONS
from data_prep.shards.tar_writer import TarShard
from data_prep.sources.outages import printable
from vitscale.data.index import NO_LABEL
from vitscale.distributed.atomic_files import fsync_folder

OUTCOME_SCHEMA = pa.schema(
    [
        ("reason", pa.string()),
        ("changes", pa.string()),
        ("input_hash", pa.binary(32)),
        ("key", pa.string()),
        ("label", pa.int32()),
        ("offset", pa.int64()),
        ("length", pa.int64()),
        ("format", pa.string()),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("content_hash", pa.binary(32)),
    ]
)


def shard_units(p: Preparation) -> list[str]:
    return [
        f"shard-{split}-{number:06d}"
        for split, plan in read_plan(p).items()
        for number in range(len(plan.shard_lengths))
    ]


def shard_path(p: Preparation, split: str, number: int) -> Path:
    return p.path("tars", f"{split}-{number:06d}.tar")


def outcome_path(p: Preparation, split: str, number: int) -> Path:
    return p.path("outcomes", f"{split}-{number:06d}.arrow")


def write_shard(p: Preparation, unit: str) -> None:
    """Read, validate and store every image of one shard."""
    _, split, digits = unit.split("-")
    number = int(digits)
    plan = read_plan(p)[split]
    temporary = p.work.temporary("tar")
    with TarShard(temporary) as tar:
        outcomes, rejected = _write_images(p, tar, plan, split=split, number=number)
        digest = tar.finish()
    os.replace(temporary, shard_path(p, split, number))
    fsync_folder(p.path("tars"))
    columns = zip(*outcomes, strict=True)
    arrays = [pa.array(c, f.type) for c, f in zip(columns, OUTCOME_SCHEMA, strict=True)]
    table = pa.Table.from_arrays(arrays, schema=OUTCOME_SCHEMA)
    write_table(table, outcome_path(p, split, number), temporary=p.work.temporary("outcome"))
    num_samples = table.column("reason").null_count
    p.put_result(unit, {"samples": num_samples, "bytes": tar.num_bytes, "blake3": digest})
    check_so_far(p, unit, rejected)


def _write_images(
    p: Preparation, tar: TarShard, plan: SplitPlan, *, split: str, number: int
) -> tuple[list[tuple[object, ...]], Rejections]:
    outcomes: list[tuple[object, ...]] = []
    rejected = Rejections()
    for rows, labels in rows_of_shard(p, plan, split, number):
        keys = rows.column("key").to_pylist()
        locations = list(row_locations(rows))
        for location, suffix, label in zip(locations, keys, labels, strict=True):
            result = validate_input(p, location)
            key, offset = f"{split}-{suffix}", 0
            if result.reason is None:
                stored = None if label == NO_LABEL else label
                offset = tar.add(
                    key, extension=result.extension, image=result.content, label=stored
                )
            else:
                rejected.add(result.reason, printable(os.fsdecode(location.path)))
            outcomes.append(_outcome(result, key=key, label=label, offset=offset))
    return outcomes, rejected


def _outcome(result: ValidationResult, *, key: str, label: int, offset: int) -> tuple[object, ...]:
    """A row of OUTCOME_SCHEMA."""
    input_hash = result.input_hash or None
    if result.reason is not None:
        assert result.reason not in EXTERNAL_REASONS
        return (result.reason, None, input_hash, *[None] * 8)
    return (
        None,
        result.changes,
        input_hash,
        key,
        label,
        offset,
        len(result.content),
        result.extension,
        result.width,
        result.height,
        result.content_hash,
    )
