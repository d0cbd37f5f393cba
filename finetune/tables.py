"""Write a table with a row for each image: what a model computes of it.

Owns: the parts of a table, which ranks share and a killed command keeps; joining them; images that
cannot be read. Leaves out: what is computed (`predicting`, `embedding`).

Shapes: B images of a batch, N of a part.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import torch

from finetune.images import Images
from vitscale.config.errors import UserError, not_written
from vitscale.config.outside import csv_cell, visible
from vitscale.data.loader import open_batches
from vitscale.data.settings import DataSettings
from vitscale.distributed.atomic_files import atomic_file, make_folders
from vitscale.distributed.world import World, errors_on_all_ranks, gather_objects
from vitscale.evaluation.trained_model import InferenceModel, TrainedModel
from vitscale.tracking.journal import item_progress

# Rows of a part at most; a small table has this many parts, so that all ranks have some.
PART_ROWS = 4096
MIN_PARTS = 64
SHOWN_ERRORS = 3
TEXT = pa.string()
# Key of the description among the metadata of a Parquet file.
DESCRIPTION = b"vitscale"


@dataclass(frozen=True, kw_only=True)
class Table:
    """The rows of `images`, and what is computed for them."""

    model: TrainedModel
    images: Images
    data: DataSettings
    """Its batch is that of a forward pass."""
    precision: str
    fields: Sequence[pa.Field]
    """The computed columns, between the name and label of an image and its error."""
    compute: Callable[[InferenceModel, torch.Tensor], Sequence[torch.Tensor]]
    """Of images, uint8 [B, 3, S, S]: tensors with a row for each."""
    columns: Callable[..., Sequence[pa.Array]]
    """The values of `fields`, of the tensors of a part and of its images that cannot be read, bool
    [N]."""
    name: str = "image"
    """Of the first column."""
    count: Callable[[pa.Table], object] = len
    """Is called with the rows of each part of the whole table."""
    notes: Callable[[], Iterable[str]] = tuple
    """What to say of the whole table, as lines."""
    description: str | None = None
    """Of all that the rows depend on. A command takes the parts that a killed one of the same
    description has left; None: none."""

    @property
    def schema(self) -> pa.Schema:
        # Types are fixed, since a first part without labels would make that column of type null.
        first = [(self.name, TEXT), ("label", TEXT)]
        schema = pa.schema([*first, *self.fields, ("error", TEXT)])
        if self.description is None:
            return schema
        return schema.with_metadata({DESCRIPTION: self.description})

    def parts(self) -> list[range]:
        """Numbers of the images of each part: whole batches, whatever the number of ranks."""
        total = self.images.total
        batch = self.data.global_batch
        rows = min(PART_ROWS, total // MIN_PARTS) // batch * batch or batch
        return [range(at, min(total, at + rows)) for at in range(0, total, rows)]


def computed(
    table: Table, world: World, numbers: Sequence[int]
) -> Iterator[tuple[int, pa.Table]]:
    """Yield this rank's share of the parts of these numbers, each with its number, in order."""
    # Ranks take neighbouring parts, so that each reads its own shards.
    start = len(numbers) * world.rank // world.world_size
    stop = len(numbers) * (world.rank + 1) // world.world_size
    parts = table.parts()
    own = {number: parts[number] for number in numbers[start:stop]}

    size = table.data.global_batch
    positions = [
        part[at : at + size]
        for part in own.values()
        for at in range(0, len(part), size)
    ]
    side = table.model.preprocessing.image_size
    samples = table.images.samples(table.data, image_size=side)
    network = table.model.for_inference(
        world, precision=table.precision, num_images=table.images.total
    )
    progress = item_progress(
        "images",
        total=sum(map(len, positions)),
        is_shown=world.is_first,
        file=sys.stderr,
    )
    with (
        open_batches(
            samples,
            positions,
            batch=size,
            settings=table.data,
            pin_memory=world.device.type == "cuda",
        ) as batches,
        progress as advance,
    ):
        for number, part in own.items():
            outputs = []
            labels: list[str | None] = []
            errors: dict[int, str] = {}
            for _ in range(0, len(part), size):
                batch = next(batches)
                tensors = table.compute(network, batch.to(world.device).images)
                outputs.append([tensor.cpu() for tensor in tensors])
                # Shards have a class for each label; files have none, so the column stays empty.
                labels += map(table.images.label_name, batch.labels.tolist())
                errors |= {image.sample: image.error for image in batch.unreadable}
                advance(len(batch.labels))

            # The batch has blank pixels for an image that cannot be read.
            is_unread_N = np.array([image in errors for image in part])
            joined = [torch.cat(tensors) for tensors in zip(*outputs, strict=True)]
            columns = [
                # Looked up for many images at once: each look-up reads a part of the index.
                pa.array(table.images.names(part), TEXT),
                pa.array(labels, TEXT),
                *table.columns(*joined, is_unread_N),
                pa.array(map(errors.get, part), TEXT),
            ]
            yield number, pa.Table.from_arrays(columns, schema=table.schema)


def write_table(table: Table, world: World, output: str) -> Iterator[str]:
    """Write the table, .csv or .parquet; yields lines to print. Collective.

    Raises UserError on every rank if one of them fails; then there is no file. Also after the last
    line, if images could not be read: a script must not take the table for a whole one.
    """
    folder = gather_objects(parts_folder(output, table))[0]
    numbers = range(len(table.parts()))
    missing = [number for number in numbers if not _file(folder, number).exists()]
    # A rank that looks late would find parts of the others.
    missing = gather_objects(missing)[0]
    if len(missing) < len(numbers):
        yield f"resumed: {len(missing):,} of {len(numbers):,} parts are missing"

    def write_parts() -> None:
        make_folders(folder)
        for number, part in computed(table, world, missing):
            with atomic_file(_file(folder, number)) as file:
                pq.write_table(part, file)

    counts = Counter[str]()
    errors: list[str] = []

    def join() -> None:
        if world.is_first:
            _join(table, folder, Path(output), counts, errors)

    try:
        on_all_ranks(write_parts, output)
        # Only now do all ranks know that no part is missing.
        on_all_ranks(
            join,
            output,
            tried=world.is_first,
        )
    except BaseException:
        # Others are for the next command.
        if world.is_first and table.description is None:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    if world.is_first:
        shutil.rmtree(folder, ignore_errors=True)
        yield f"{output}: {counts['images']:,} images, {counts['unread']:,} of them unreadable"
        yield from table.notes()
        if table.images.num_left_out:
            yield f"left out {table.images.num_left_out:,} files that are no images by their name"
        yield from errors
        if counts["unread"] > len(errors):
            more = counts["unread"] - len(errors)
            yield f"... {more:,} more, with the reason in column error"
    # Only the first rank has counted.
    refuse_unread(gather_objects(counts)[0]["unread"], table.images.total)


def parts_folder(output: str, table: Table) -> Path:
    """Where the parts are; a new folder where no command takes those of another."""
    path = Path(output).absolute()
    description = table.description or uuid.uuid4().hex
    key = hashlib.sha256(description.encode()).hexdigest()[:12]
    return path.with_name(f".{path.name}.{key}.parts")


def _file(folder: Path, number: int) -> Path:
    return folder / f"{number:08}"


def _join(
    table: Table, folder: Path, output: Path, counts: Counter[str], errors: list[str]
) -> None:
    """Write `output` from the parts, and count its images.

    errors: gets a sentence on each of the first unreadable ones.
    """
    is_parquet = output.suffix == ".parquet"
    kind = pq.ParquetWriter if is_parquet else pa_csv.CSVWriter

    # Part by part: the table of a whole corpus does not fit into memory.
    with atomic_file(output) as file, kind(file, table.schema) as writer:
        for number in range(len(table.parts())):
            with pq.ParquetFile(_file(folder, number)) as part:
                rows = part.read()
            writer.write_table(rows if is_parquet else _csv_cells(rows))

            table.count(rows)
            unread = rows.filter(rows["error"].is_valid())
            counts["images"] += len(rows)
            counts["unread"] += len(unread)
            for row in unread.slice(0, SHOWN_ERRORS - len(errors)).to_pylist():
                errors.append(visible(f"unreadable: {row[table.name]}: {row['error']}"))


def _csv_cells(table: pa.Table) -> pa.Table:
    # A spreadsheet would run the name of a class or file that looks like a formula.
    columns = [
        pa.array(map(csv_cell, column.to_pylist()), column.type)
        for column in table.columns
    ]
    return pa.Table.from_arrays(columns, schema=table.schema)


def refuse_unread(num: int, total: int) -> None:
    """Raise UserError for images that could not be read."""
    if num:
        raise UserError(
            f"{num:,} of {total:,} could not be read",
            where="images",
            next_step="repair or remove them; those that could be read are in the table",
        )


def on_all_ranks(work: Callable[[], Any], output: str, *, tried: bool = True) -> Any:
    """Call `work`. Raises UserError on every rank if one of them fails. Collective.

    tried: whether it does anything on this rank.
    """
    with errors_on_all_ranks("cannot be written", output, tried=tried):
        try:
            return work()
        except OSError as error:
            raise not_written(error, f"output={output}") from None
