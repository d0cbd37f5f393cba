"""Predict the classes of images: each rank takes a contiguous share."""

from __future__ import annotations

import shutil
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import torch

from finetune.images import Images, find_files, shard_folder
from finetune.settings import PredictRun
from vitscale.config.errors import UserError, not_written
from vitscale.config.outside import csv_cell, visible
from vitscale.data.index import read_split
from vitscale.data.loader import open_batches
from vitscale.data.settings import DataSettings
from vitscale.distributed.atomic_files import atomic_file, make_folders
from vitscale.distributed.world import World, errors_on_all_ranks, gather_objects
from vitscale.evaluation.classes import column_of_each_class
from vitscale.evaluation.trained_model import TrainedModel
from vitscale.tracking.journal import item_progress

# The prediction of one image, with the columns of `schema`.
Row = dict[str, Any]

MAX_PRINTED = 100
# Rows between two writes; the keys of shards are looked up for as many at once.
CHUNK_ROWS = 4096
SHOWN_ERRORS = 3


def find_inputs(run: PredictRun) -> Images:
    """The images of `run`.

    Raises UserError for paths that do not exist, shards beside other images, and more images than
    a person reads where nothing is written.
    """
    shards = shard_folder(run.images)
    if shards is None:
        images = find_files(run.images)
    else:
        index = read_split(
            shards, split=run.split, key="split", remote_settings=run.remote
        )
        images = Images(index=index)

    # Thousands of lines in a terminal are an output that was forgotten.
    if run.output is None and images.total > MAX_PRINTED:
        raise UserError(
            f"{images.total:,} images and no output",
            where="output",
            allowed=f"at most {MAX_PRINTED} images are printed",
            next_step="set output=predictions.csv or output=predictions.parquet",
        )
    return images


def check_head(model: TrainedModel) -> None:
    """Raise UserError for a model that predicts no classes."""
    if model.num_classes == 0:
        raise UserError(
            "this model has no head, so it predicts no classes",
            where=model.source,
            next_step="make a classifier of it by vitscale evaluate own_features, or finetune own",
        )


def planned(run: PredictRun, images: Images) -> Iterator[str]:
    """What `predict_images` would read and write, as lines to print."""
    yield (
        f"dry run: would predict {images.total:,} images, the first {images.names([0])[0]!r}, and "
        f"leave out {images.num_left_out:,} other files"
    )
    yield f"the table: {run.output or 'on the screen'}"


def predict_images(
    run: PredictRun, model: TrainedModel, images: Images, world: World
) -> Iterator[str]:
    """Write the table, or none without `output`; yields lines to print. Collective.

    Raises UserError on every rank if one of them fails; then there is no file. Also after the last
    line, if images could not be read: a script must not take the table for a whole one.
    """
    # A model of two classes has no five most probable ones.
    top = min(run.top, model.num_classes)
    names, no_accuracy = output_names(model, images)
    chunks = predictions(run, model, images, world, top=top, names=names)
    if run.output is None:
        rows = _on_all_ranks(run, lambda: [row for chunk in chunks for row in chunk])
        num_unread = 0
        for rows_of_rank in gather_objects(rows):
            for row in rows_of_rank:
                yield from _lines(row, top=top)
                num_unread += row["error"] is not None
        _refuse_unread(num_unread, images.total)
        return

    # Each rank writes a Parquet file; the first joins them in the order of the images. The name is
    # a new one, as a command that was killed may have left a folder.
    output = Path(run.output).absolute()
    name = gather_objects(f".{output.name}.{uuid.uuid4().hex[:8]}.parts")[0]
    parts = output.with_name(name)

    def write_part() -> None:
        make_folders(parts)
        with pq.ParquetWriter(parts / f"{world.rank:05d}", schema(top)) as writer:
            for chunk in chunks:
                writer.write_table(pa.Table.from_pylist(chunk, schema(top)))

    try:
        _on_all_ranks(run, write_part)
        # Only now do all ranks know that no part is missing.
        counts = _on_all_ranks(
            run,
            lambda: _join(parts, output) if world.is_first else None,
            tried=world.is_first,
        )
    finally:
        if world.is_first:
            shutil.rmtree(parts, ignore_errors=True)
    if counts is not None:
        yield from _report(
            run.output, *counts, left_out=images.num_left_out, no_accuracy=no_accuracy
        )
    # Only the first rank has counted.
    sums = gather_objects(counts[0] if counts else Counter())
    _refuse_unread(sums[0]["unread"], images.total)


def _refuse_unread(num: int, total: int) -> None:
    """Raise UserError for images that could not be read."""
    if num:
        raise UserError(
            f"{num:,} of {total:,} could not be read",
            where="images",
            next_step="repair or remove them; those that could be read were predicted",
        )


def _on_all_ranks(
    run: PredictRun, work: Callable[[], Any], *, tried: bool = True
) -> Any:
    """Call `work`. Raises UserError on every rank if one of them fails. Collective.

    tried: whether it does anything on this rank.
    """
    with errors_on_all_ranks("cannot be written", str(run.output), tried=tried):
        try:
            return work()
        except OSError as error:
            raise not_written(error, f"output={run.output}") from None


def output_names(model: TrainedModel, images: Images) -> tuple[Sequence[str], str]:
    """Name of each output, and why predictions cannot be compared with labels; empty: they can.

    Outputs that are classes of the shards have the names that the labels have.
    """
    names = list(model.class_names)
    if images.index is None or not images.index.classes:
        return names, ""
    classes = images.index.classes
    try:
        matched = column_of_each_class(
            model.classes, classes, num_outputs=model.num_classes
        )
    except UserError as error:
        return names, error.what

    # The accuracy over the classes that the model knows would look like that over all.
    lacking = matched.lacking(classes)
    if lacking:
        return names, (
            f"{len(lacking):,} of {len(classes):,} classes of the shards are none of the model's, "
            f"such as {lacking[0]!r}"
        )
    for name, column in zip(classes, matched.columns, strict=True):
        names[column] = name
    return names, ""


def _lines(row: Row, *, top: int) -> Iterator[str]:
    """What is printed about one image. File names come from outside: no control characters."""
    heading = row["image"]
    if row["label"] is not None:
        heading += f" ({row['label']})"
    if row["error"] is not None:
        yield visible(f"{heading}: cannot be read: {row['error']}")
        return
    yield visible(heading)
    for rank in range(1, top + 1):
        yield visible(f"  {row[f'p_{rank}']:7.2%}  {row[f'class_{rank}']}")


def predictions(
    run: PredictRun,
    model: TrainedModel,
    images: Images,
    world: World,
    *,
    top: int,
    names: Sequence[str],
) -> Iterator[list[Row]]:
    """Yield the predictions for this rank's images, in order, CHUNK_ROWS at a time."""
    start = images.total * world.rank // world.world_size
    stop = images.total * (world.rank + 1) // world.world_size
    size = run.compute.batch
    positions = [
        range(first, min(stop, first + size)) for first in range(start, stop, size)
    ]
    settings = DataSettings(
        path=run.images[0],
        global_batch=size,
        num_workers=run.num_workers,
        remote=run.remote,
        **model.preprocessing.data_values(),
    )
    # Ranks take neighbouring images, so that each reads its own part of a shard.
    samples = images.samples(settings, image_size=model.preprocessing.image_size)
    network = model.for_inference(
        world, precision=run.compute.precision, num_images=images.total
    )

    pending: list[Row] = []
    progress = item_progress(
        "predict", total=stop - start, is_shown=world.is_first, file=sys.stderr
    )
    with (
        open_batches(
            samples,
            positions,
            batch=size,
            settings=settings,
            pin_memory=world.device.type == "cuda",
        ) as batches,
        progress as advance,
    ):
        for numbers, cpu_batch in zip(positions, batches, strict=True):
            logits_BC = network.logits(cpu_batch.to(world.device).images)
            advance(len(numbers))
            shares_BK, ranked_BK = ranked(logits_BC, model, top=top)
            errors = {image.sample: image.error for image in cpu_batch.unreadable}
            # Shards have a class for each label; files have none, so the column stays empty.
            labels = map(images.label_name, cpu_batch.labels.tolist())
            for number, label, shares, columns in zip(
                numbers, labels, shares_BK.tolist(), ranked_BK.tolist(), strict=True
            ):
                row: Row = {"label": label, "error": errors.get(number)}
                pending.append(row)
                # The batch has blank pixels for an image that cannot be read.
                if number in errors:
                    continue
                for rank in range(top):
                    row[f"class_{rank + 1}"] = names[columns[rank]]
                    row[f"p_{rank + 1}"] = shares[rank]

            # Keys are looked up for many images at once: each look-up reads a part of the index.
            if len(pending) >= CHUNK_ROWS or numbers.stop == stop:
                done = range(numbers.stop - len(pending), numbers.stop)
                yield [
                    {"image": name, **row}
                    for name, row in zip(images.names(done), pending, strict=True)
                ]
                pending = []


def ranked(
    logits_BC: torch.Tensor, model: TrainedModel, *, top: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shares of the most probable classes, and these classes, each [B, top].

    Raises UserError where an output is not finite.
    """
    if not logits_BC.isfinite().all():
        raise UserError(
            "the model's outputs are not finite (NaN or infinity)",
            where=model.source,
            next_step="give an earlier checkpoint, or other weights",
        )

    # A model that was trained with a sigmoid gives each class a probability of its own.
    if model.independent:
        shares_BC = logits_BC.sigmoid()
    else:
        shares_BC = logits_BC.softmax(dim=1)

    # Ranked by the logits: many shares are rounded to 0 or 1.
    ranked_BK = logits_BC.topk(top, dim=1).indices
    return shares_BC.gather(1, ranked_BK), ranked_BK


# ---- the table ----------------------------------------------------------------------------------


def schema(top: int) -> pa.Schema:
    """top: classes of each image."""
    # Types are fixed, since a first batch without labels would make that column of type null.
    fields = [("image", pa.string()), ("label", pa.string())]
    for rank in range(1, top + 1):
        fields += [(f"class_{rank}", pa.string()), (f"p_{rank}", pa.float32())]
    return pa.schema([*fields, ("error", pa.string())])


def _join(parts: Path, output: Path) -> tuple[Counter[str], list[str]]:
    """Write `output`, .csv or .parquet, from the files of all ranks.

    Returns the numbers of images, and a sentence on each of the first unreadable ones.
    """
    # The names of the parts are the ranks, which read the images in this order.
    files = [pq.ParquetFile(part) for part in sorted(parts.iterdir())]
    is_parquet = output.suffix == ".parquet"
    kind = pq.ParquetWriter if is_parquet else pa_csv.CSVWriter
    counts = Counter[str]()
    errors: list[str] = []

    # Part by part: the table of a whole corpus does not fit into memory.
    with atomic_file(output) as file, kind(file, files[0].schema_arrow) as writer:
        for table in _row_groups(files):
            writer.write_table(table if is_parquet else _csv_cells(table))

            reported = table.select(("image", "label", "class_1", "error"))
            columns = [column.to_pylist() for column in reported.columns]
            for image, label, guess, error in zip(*columns, strict=True):
                counts["images"] += 1
                if error is not None:
                    counts["unread"] += 1
                    if len(errors) < SHOWN_ERRORS:
                        errors.append(visible(f"unreadable: {image}: {error}"))
                elif label is not None:
                    counts["labelled"] += 1
                    if guess == label:
                        counts["right"] += 1
    return counts, errors


def _row_groups(files: Sequence[pq.ParquetFile]) -> Iterator[pa.Table]:
    """One at a time; `iter_batches` keeps those it has read in memory."""
    for file in files:
        for number in range(file.num_row_groups):
            yield file.read_row_group(number)


def _csv_cells(table: pa.Table) -> pa.Table:
    # A spreadsheet would run the name of a class or file that looks like a formula.
    columns = [
        pa.array(map(csv_cell, column.to_pylist()), column.type)
        for column in table.columns
    ]
    return pa.Table.from_arrays(columns, schema=table.schema)


def _report(
    output: str,
    count: Counter[str],
    errors: list[str],
    *,
    left_out: int,
    no_accuracy: str,
) -> Iterator[str]:
    yield f"{output}: {count['images']:,} images, {count['unread']:,} of them unreadable"
    labelled = count["labelled"]
    if no_accuracy:
        yield f"no accuracy: {no_accuracy}"
    elif labelled:
        yield f"top-1 {count['right'] / labelled:.2%} of {labelled:,} images with a label"
    if left_out:
        yield f"left out {left_out:,} files that are no images by their name"
    yield from errors
    if count["unread"] > len(errors):
        yield f"... {count['unread'] - len(errors):,} more, with the reason in column error"
