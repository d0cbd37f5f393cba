"""Predict the classes of images: each rank takes a contiguous share."""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from finetune.inference.prediction.inputs import Inputs
from finetune.inference.prediction.settings import PredictRun
from finetune.inference.prediction.tables import ImagePrediction, join_parts, open_part
from finetune.loading.loaded_model import LoadedModel
from vitscale.config.errors import UserError, not_written
from vitscale.data.loader import Batch, batches_of
from vitscale.data.settings import DataSettings
from vitscale.distributed.atomic_files import make_folders
from vitscale.distributed.world import (
    World,
    agree_no_error,
    broadcast_object,
    gather_objects,
)

MAX_PRINTED = 100
PROGRESS_EVERY_S = 10.0
# Rows between two writes; the keys of shards are looked up for as many at once.
CHUNK_ROWS = 4096
SHOWN_ERRORS = 3


@dataclass(kw_only=True)
class Count:
    """What was predicted, over the images of one rank or of all."""

    images: int = 0
    unreadable: int = 0
    labelled: int = 0
    """Readable images whose true class is known."""
    right: int = 0
    """Of those, images whose most probable class is the true one."""


def check_printable(run: PredictRun, inputs: Inputs) -> None:
    """Raise UserError for more images than a person reads."""
    if run.output is None and inputs.num_images > MAX_PRINTED:
        raise UserError(
            f"{inputs.num_images:,} images and no output",
            where="output",
            allowed=f"at most {MAX_PRINTED} images are printed",
            next_step="set output=predictions.csv or output=predictions.parquet",
        )


def check_head(loaded: LoadedModel) -> None:
    """Raise UserError for a model without a classifier."""
    if loaded.num_classes == 0:
        raise UserError(
            "this model has no head, so it predicts no classes",
            where=loaded.source,
            next_step="fine-tune it with finetune/main.py, and give that run",
        )


def predict_and_print(
    run: PredictRun, loaded: LoadedModel, inputs: Inputs, world: World
) -> Iterator[str]:
    """Lines for people, in the order of the images. Collective."""
    rows: list[ImagePrediction] = []
    error = None
    try:
        rows = [row for chunk in _chunks(run, loaded, inputs, world) for row in chunk]
    except UserError as caught:
        error = caught.text()
    agree_no_error(error)
    for row in [row for part in gather_objects(rows) for row in part]:
        yield from _lines(row)


def predict_to_file(
    run: PredictRun, loaded: LoadedModel, inputs: Inputs, world: World
) -> Iterator[str]:
    """Write the table; yields lines for people. Collective.

    Raises UserError on every rank if one of them fails; then there is no file.
    """
    assert run.output is not None
    output, top = Path(run.output).absolute(), _num_ranked(run, loaded)
    parts = output.with_name(broadcast_object(f".{output.name}.{uuid.uuid4().hex[:8]}.parts"))
    count, errors = Count(), list[ImagePrediction]()
    error: str | None = None
    try:
        try:
            make_folders(parts)
            with closing(open_part(parts, output.suffix, rank=world.rank, top=top)) as part:
                for chunk in _chunks(run, loaded, inputs, world):
                    part.write(chunk)
                    _add(count, chunk)
                    errors += [row for row in chunk if row.error][: SHOWN_ERRORS - len(errors)]
        except UserError as caught:
            error = caught.text()
        except OSError as caught:
            error = not_written(caught, key="output", path=run.output).text()
        agree_no_error(error)
        if world.is_first:
            try:
                join_parts(parts, output, top=top)
            except OSError as caught:
                error = not_written(caught, key="output", path=run.output).text()
        agree_no_error(error)
    finally:
        if world.is_first:
            shutil.rmtree(parts, ignore_errors=True)
    yield from _summary(run, gather_objects(count), gather_objects(errors), inputs)


def _summary(
    run: PredictRun, counts: list[Count], errors: list[list[ImagePrediction]], inputs: Inputs
) -> Iterator[str]:
    total = Count(
        images=sum(c.images for c in counts),
        unreadable=sum(c.unreadable for c in counts),
        labelled=sum(c.labelled for c in counts),
        right=sum(c.right for c in counts),
    )
    yield f"{run.output}: {total.images:,} images, {total.unreadable:,} of them unreadable"
    if total.labelled:
        share = total.right / total.labelled
        yield f"top-1 {share:.2%} of {total.labelled:,} images with a label"
    if inputs.num_left_out:
        yield f"left out {inputs.num_left_out:,} files that are no images by their name"
    shown = [row for part in errors for row in part][:SHOWN_ERRORS]
    yield from (f"unreadable: {row.image}: {row.error}" for row in shown)
    if total.unreadable > len(shown):
        yield f"... {total.unreadable - len(shown):,} more, with the reason in column error"


def _add(count: Count, rows: list[ImagePrediction]) -> None:
    for row in rows:
        count.images += 1
        count.unreadable += row.error is not None
        if row.error is None and row.label is not None:
            count.labelled += 1
            count.right += row.classes[0] == row.label


def _lines(row: ImagePrediction) -> Iterator[str]:
    label = f" ({row.label})" if row.label is not None else ""
    if row.error is not None:
        yield f"{row.image}{label}: cannot be read: {row.error}"
        return
    yield f"{row.image}{label}"
    for name, share in zip(row.classes, row.probabilities, strict=True):
        yield f"  {share:7.2%}  {name}"


def _num_ranked(run: PredictRun, loaded: LoadedModel) -> int:
    return min(run.top, loaded.num_classes)


def class_names(loaded: LoadedModel) -> tuple[str, ...]:
    """By label; numbers where the names are unknown."""
    return loaded.classes or tuple(f"class {label}" for label in range(loaded.num_classes))


def _chunks(
    run: PredictRun, loaded: LoadedModel, inputs: Inputs, world: World
) -> Iterator[list[ImagePrediction]]:
    """The predictions of this rank's share, in order."""
    start, stop = (
        inputs.num_images * rank // world.world_size for rank in (world.rank, world.rank + 1)
    )
    size = run.compute.batch
    positions = [range(at, min(stop, at + size)) for at in range(start, stop, size)]
    samples = inputs.samples(
        _data_settings(run, loaded), image_size=loaded.preprocessing.image_size
    )
    batches = batches_of(
        samples,
        positions,
        settings=_data_settings(run, loaded),
        pin_memory=world.device.type == "cuda",
    )
    model = loaded.for_inference(world, precision=run.compute.precision)
    ranking = _Ranking(loaded, top=_num_ranked(run, loaded))
    progress = _Progress(stop - start, is_shown=world.is_first and run.output is not None)
    pending: list[tuple[int, ImagePrediction]] = []
    with closing(batches):
        for numbers, cpu_batch in zip(positions, batches, strict=True):
            logits_BC = model.logits(cpu_batch.to(world.device).images)
            pending += _unnamed(cpu_batch, logits_BC, ranking, inputs, numbers)
            progress.add(len(numbers))
            if len(pending) >= CHUNK_ROWS:
                yield _named(pending, inputs)
                pending = []
    if pending:
        yield _named(pending, inputs)


def _unnamed(
    batch: Batch, logits_BC: torch.Tensor, ranking: _Ranking, inputs: Inputs, numbers: range
) -> Iterator[tuple[int, ImagePrediction]]:
    """The number of each image, and its row without the name."""
    errors = {each.sample: each.error for each in batch.unreadable}
    ranked = ranking(logits_BC)
    for number, label, (classes, shares) in zip(
        numbers, batch.labels.tolist(), ranked, strict=True
    ):
        error = errors.get(number)
        if error is not None:
            classes, shares = (), ()
        yield number, ImagePrediction("", inputs.label_name(label), classes, shares, error)


def _named(pending: list[tuple[int, ImagePrediction]], inputs: Inputs) -> list[ImagePrediction]:
    names = inputs.names([number for number, _ in pending])
    return [row._replace(image=name) for name, (_, row) in zip(names, pending, strict=True)]


def _data_settings(run: PredictRun, loaded: LoadedModel) -> DataSettings:
    return DataSettings(
        path=run.images[0],
        global_batch=run.compute.batch,
        num_workers=run.num_workers,
        remote=run.remote,
        **loaded.preprocessing.data_values(),
    )


class _Ranking:
    """The most probable classes of each image, with their probabilities."""

    def __init__(self, loaded: LoadedModel, *, top: int) -> None:
        self._names, self._top = class_names(loaded), top
        config = loaded.trained.config if loaded.trained is not None else {}
        # Trained with a sigmoid of each class, whose probabilities need not sum to 1.
        self._is_sigmoid = (config.get("objective") or {}).get("loss") == "sigmoid"

    def __call__(
        self, logits_BC: torch.Tensor
    ) -> Iterator[tuple[tuple[str, ...], tuple[float, ...]]]:
        shares_BC = logits_BC.sigmoid() if self._is_sigmoid else logits_BC.softmax(dim=1)
        shares_BK, labels_BK = shares_BC.topk(self._top, dim=1)
        for shares, labels in zip(shares_BK.tolist(), labels_BK.tolist(), strict=True):
            yield tuple(self._names[label] for label in labels), tuple(shares)


class _Progress:
    """A line every few seconds, for the share of one rank."""

    def __init__(self, num_images: int, *, is_shown: bool) -> None:
        self._num_images, self._is_shown, self._done = num_images, is_shown, 0
        self._start = self._said = time.monotonic()

    def add(self, num_images: int) -> None:
        self._done += num_images
        now = time.monotonic()
        if not self._is_shown or now - self._said < PROGRESS_EVERY_S:
            return
        self._said = now
        rate = self._done / (now - self._start)
        print(f"{self._done:,} of {self._num_images:,} images, {rate:.0f}/s", flush=True)
