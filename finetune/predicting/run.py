"""Predict the classes of images: each rank takes a contiguous share.

Owns: the order, the table of predictions (whole or absent), and what is printed.
"""

from __future__ import annotations

import csv
import io
import shutil
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from finetune.predicting.inputs import Files, Shards, find_files, shard_folder
from finetune.predicting.settings import PredictRun
from vitscale.config.errors import UserError, not_written
from vitscale.data.index import read_split
from vitscale.data.loader import batches_of
from vitscale.data.settings import DataSettings
from vitscale.distributed.atomic_files import atomic_file, make_folders
from vitscale.distributed.world import (
    World,
    agree_no_error,
    broadcast_object,
    gather_objects,
)
from vitscale.evaluation.trained_model import TrainedModel

MAX_PRINTED = 100
# Rows between two writes; the keys of shards are looked up for as many at once.
CHUNK_ROWS = 4096
SHOWN_ERRORS = 3


class Prediction(NamedTuple):
    """The prediction of one image."""

    image: str
    label: str | None
    """The true class, where it is known."""
    classes: tuple[str, ...] = ()
    """The most probable first; empty for an unreadable image."""
    probabilities: tuple[float, ...] = ()
    error: str | None = None
    """Why the image cannot be read."""


def find_inputs(run: PredictRun) -> Files | Shards:
    """The images of `run`.

    Raises UserError for paths that do not exist, shards beside other images, and more images than
    a person reads where nothing is written.
    """
    shards = shard_folder(run.images)
    inputs: Files | Shards
    if shards is None:
        inputs = find_files(run.images)
    else:
        inputs = Shards(
            read_split(shards, split=run.split, key="split", remote_settings=run.remote)
        )
    if run.output is None and inputs.num_images > MAX_PRINTED:
        raise UserError(
            f"{inputs.num_images:,} images and no output",
            where="output",
            allowed=f"at most {MAX_PRINTED} images are printed",
            next_step="set output=predictions.csv or output=predictions.parquet",
        )
    return inputs


def predict_images(
    run: PredictRun, model: TrainedModel, inputs: Files | Shards, world: World
) -> Iterator[str]:
    """Write the table, or none without `output`; yields lines for people. Collective.

    Raises UserError on every rank if one of them fails; then there is no file.
    """
    if model.num_classes == 0:
        raise UserError(
            "this model has no head, so it predicts no classes",
            where=model.source,
            next_step="fine-tune it with finetune/main.py, and give that run",
        )
    chunks = predictions(run, model, inputs, world)
    if run.output is None:
        yield from _printed(chunks)
    else:
        yield from _written(run, chunks, inputs, world, top=min(run.top, model.num_classes))


def _printed(chunks: Iterator[list[Prediction]]) -> Iterator[str]:
    rows: list[Prediction] = []
    error = None
    try:
        rows = [row for chunk in chunks for row in chunk]
    except UserError as caught:
        error = caught.text()
    agree_no_error(error)
    for row in (row for part in gather_objects(rows) for row in part):
        label = f" ({row.label})" if row.label is not None else ""
        reason = f": cannot be read: {row.error}" if row.error is not None else ""
        yield f"{row.image}{label}{reason}"
        for name, share in zip(row.classes, row.probabilities, strict=True):
            yield f"  {share:7.2%}  {name}"


def _written(
    run: PredictRun,
    chunks: Iterator[list[Prediction]],
    inputs: Files | Shards,
    world: World,
    *,
    top: int,
) -> Iterator[str]:
    """Each rank writes a Parquet file; the first joins them in the order of the images."""
    assert run.output is not None
    output = Path(run.output).absolute()
    parts = output.with_name(broadcast_object(f".{output.name}.{uuid.uuid4().hex[:8]}.parts"))
    count, errors = Counter[str](), list[Prediction]()
    error: str | None = None
    try:
        try:
            make_folders(parts)
            with pq.ParquetWriter(parts / f"{world.rank:05d}", schema(top)) as writer:
                for chunk in chunks:
                    writer.write_table(as_table(chunk, top=top))
                    errors += [row for row in chunk if row.error][: SHOWN_ERRORS - len(errors)]
                    count.update(images=len(chunk))
                    for row in chunk:
                        labelled = row.error is None and row.label is not None
                        right = labelled and row.classes[0] == row.label
                        count.update(unread=row.error is not None, labelled=labelled, right=right)
        except UserError as caught:
            error = caught.text()
        except OSError as caught:
            error = not_written(caught, key="output", path=run.output).text()
        agree_no_error(error)
        if world.is_first:
            try:
                _join(sorted(parts.iterdir()), output, top=top)
            except OSError as caught:
                error = not_written(caught, key="output", path=run.output).text()
        agree_no_error(error)
    finally:
        if world.is_first:
            shutil.rmtree(parts, ignore_errors=True)
    total = sum(gather_objects(count), Counter[str]())
    yield f"{run.output}: {total['images']:,} images, {total['unread']:,} of them unreadable"
    if total["labelled"]:
        share = total["right"] / total["labelled"]
        yield f"top-1 {share:.2%} of {total['labelled']:,} images with a label"
    if inputs.num_left_out:
        yield f"left out {inputs.num_left_out:,} files that are no images by their name"
    shown = [row for part in gather_objects(errors) for row in part][:SHOWN_ERRORS]
    yield from (f"unreadable: {row.image}: {row.error}" for row in shown)
    if total["unread"] > len(shown):
        yield f"... {total['unread'] - len(shown):,} more, with the reason in column error"


def predictions(
    run: PredictRun, model: TrainedModel, inputs: Files | Shards, world: World
) -> Iterator[list[Prediction]]:
    """The predictions of this rank's share, in order, some thousand at a time."""
    start, stop = (
        inputs.num_images * rank // world.world_size for rank in (world.rank, world.rank + 1)
    )
    size, top = run.compute.batch, min(run.top, model.num_classes)
    positions = [range(at, min(stop, at + size)) for at in range(start, stop, size)]
    settings = DataSettings(
        path=run.images[0],
        global_batch=size,
        num_workers=run.num_workers,
        remote=run.remote,
        **model.preprocessing.data_values(),
    )
    samples = inputs.samples(settings, image_size=model.preprocessing.image_size)
    pinned = world.device.type == "cuda"
    batches = batches_of(samples, positions, settings=settings, pin_memory=pinned)
    network, names = model.for_inference(world, precision=run.compute.precision), model.class_names
    config = {} if model.run is None else model.run.config
    # Trained with a sigmoid of each class, whose probabilities need not sum to 1.
    is_sigmoid = (config.get("objective") or {}).get("loss") == "sigmoid"
    pending: list[Prediction] = []
    first = start
    with closing(batches):
        for numbers, cpu_batch in zip(positions, batches, strict=True):
            logits_BC = network.logits(cpu_batch.to(world.device).images)
            shares_BC = logits_BC.sigmoid() if is_sigmoid else logits_BC.softmax(dim=1)
            shares_BK, ranked_BK = (part.tolist() for part in shares_BC.topk(top, dim=1))
            errors = {each.sample: each.error for each in cpu_batch.unreadable}
            for row, number in enumerate(numbers):
                label = inputs.label_name(int(cpu_batch.labels[row]))
                if number in errors:
                    pending.append(Prediction("", label, error=errors[number]))
                else:
                    classes = tuple(names[each] for each in ranked_BK[row])
                    pending.append(Prediction("", label, classes, tuple(shares_BK[row])))
            if len(pending) >= CHUNK_ROWS or numbers.stop == stop:
                found = inputs.names(range(first, numbers.stop))
                yield [row._replace(image=name) for name, row in zip(found, pending, strict=True)]
                pending, first = [], numbers.stop


# ---- the table ----------------------------------------------------------------------------------


def schema(top: int) -> pa.Schema:
    """top: classes of each image."""
    ranks = range(1, top + 1)
    pairs = ((f"class_{k}", f"p_{k}") for k in ranks)
    names = ["image", "label", *(name for pair in pairs for name in pair), "error"]
    return pa.schema(
        [(name, pa.float32() if name.startswith("p_") else pa.string()) for name in names]
    )


def as_table(rows: Sequence[Prediction], *, top: int) -> pa.Table:
    columns = {key: [getattr(row, key) for row in rows] for key in ("image", "label", "error")}
    for rank in range(top):
        known = [rank < len(row.classes) for row in rows]
        pairs = list(zip(rows, known, strict=True))
        columns[f"class_{rank + 1}"] = [
            row.classes[rank] if is_in else None for row, is_in in pairs
        ]
        columns[f"p_{rank + 1}"] = [
            row.probabilities[rank] if is_in else None for row, is_in in pairs
        ]
    return pa.table(columns, schema=schema(top))


def _join(parts: Sequence[Path], output: Path, *, top: int) -> None:
    """Write `output` from the Parquet files of all ranks, as .csv or .parquet."""
    batches = (batch for part in parts for batch in pq.ParquetFile(part).iter_batches())
    with atomic_file(output) as file:
        if output.suffix == ".parquet":
            with pq.ParquetWriter(file, schema(top)) as writer:
                for batch in batches:
                    writer.write_batch(batch)
            return
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        table = csv.writer(text)
        table.writerow(schema(top).names)
        for batch in batches:
            for row in batch.to_pylist():
                values = row.values()
                table.writerow(f"{v:.6g}" if isinstance(v, float) else v for v in values)
        text.detach()
