"""Predict the classes of images."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from finetune.images import Images, find_files, images_of_split, shard_folder
from finetune.settings import PredictRun
from finetune.tables import (
    TEXT,
    Table,
    computed,
    on_all_ranks,
    refuse_unread,
    write_table,
)
from vitscale.config.errors import UserError
from vitscale.config.outside import visible
from vitscale.distributed.world import World, gather_objects
from vitscale.evaluation.classes import column_of_each_class
from vitscale.evaluation.trained_model import TrainedModel

# The prediction of one image, by column.
Row = dict[str, Any]

MAX_PRINTED = 100


def find_inputs(run: PredictRun) -> Images:
    """The images of `run`.

    Raises UserError for paths that do not exist, shards beside other images, and more images than
    a person reads where nothing is written.
    """
    shards = shard_folder(run.images)
    if shards is None:
        images = find_files(run.images)
    else:
        images = images_of_split(shards, split=run.split, remote=run.remote)

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

    Raises what `write_table` does.
    """
    table = class_table(run, model, images)
    if run.output is not None:
        yield from write_table(table, world, run.output)
        return

    # Without a table all ranks give their rows to the first, which prints them in order.
    def rows() -> list[Row]:
        parts = computed(table, world, range(len(table.parts())))
        return [row for _, part in parts for row in part.to_pylist()]

    num_unread = 0
    for rows_of_rank in gather_objects(on_all_ranks(rows, "screen")):
        for row in rows_of_rank:
            yield from _lines(row, top=min(run.top, model.num_classes))
            num_unread += row["error"] is not None
    refuse_unread(num_unread, images.total)


def class_table(run: PredictRun, model: TrainedModel, images: Images) -> Table:
    """The most probable classes of each image, and the accuracy where labels are known."""
    # A model of two classes has no five most probable ones.
    top = min(run.top, model.num_classes)
    # Columns are named by rank, the most probable class first.
    names, no_accuracy = output_names(model, images)
    fields = []
    for rank in range(1, top + 1):
        fields.append(pa.field(f"class_{rank}", TEXT))
        fields.append(pa.field(f"p_{rank}", pa.float32()))

    def columns(
        shares_NK: torch.Tensor, ranked_NK: torch.Tensor, is_unread_N: np.ndarray
    ) -> list[pa.Array]:
        arrays = []
        for rank in range(top):
            # An image that cannot be read has a row, and no class.
            classes = np.array(names, object)[ranked_NK[:, rank]]
            arrays.append(pa.array(classes, TEXT, mask=is_unread_N))
            arrays.append(pa.array(shares_NK[:, rank].numpy(), mask=is_unread_N))
        return arrays

    counts = Counter[str]()

    def count(rows: pa.Table) -> None:
        # No number where there is no label, or no class since the image cannot be read.
        is_right = pc.equal(rows["label"], rows["class_1"]).drop_null()
        counts["labelled"] += len(is_right)
        counts["right"] += sum(is_right.to_pylist())

    def notes() -> Iterator[str]:
        labelled = counts["labelled"]
        if no_accuracy:
            yield f"no accuracy: {no_accuracy}"
        elif labelled:
            share = counts["right"] / labelled
            yield f"top-1 {share:.2%} of {labelled:,} images with a label"

    return Table(
        model=model,
        images=images,
        data=model.preprocessing.settings(
            batch=run.compute.batch,
            num_workers=run.num_workers,
            remote=run.remote,
        ),
        precision=run.compute.precision,
        fields=fields,
        compute=lambda network, images_B3SS: ranked(
            network.logits(images_B3SS), model, top=top
        ),
        columns=columns,
        count=count,
        notes=notes,
    )


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
