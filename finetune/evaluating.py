"""Evaluate a trained model on a folder of shards: one table (text, JSON, CSV, Markdown), and an
MLflow run."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from finetune.exporting.to_vitscale import SafetensorsFormat
from finetune.settings import CHOOSING, EvaluateRun
from vitscale.checkpoint.store import run_folder_lock
from vitscale.config.changes import changed_settings
from vitscale.config.errors import UserError
from vitscale.config.loader import run_to_yaml, shorten
from vitscale.config.redaction import short_reason
from vitscale.data.index import SplitIndex
from vitscale.data.settings import DataSettings
from vitscale.data.training_set import open_training_set, open_val_split
from vitscale.distributed.atomic_files import json_text, write_json, write_text
from vitscale.distributed.node_files import once_per_node
from vitscale.distributed.world import World, errors_on_all_ranks, gather_objects
from vitscale.evaluation.evaluation import (
    FILES,
    Share,
    Subject,
    csv_text,
    results,
)
from vitscale.evaluation.linear_heads import LinearHeads
from vitscale.evaluation.registry import EVALUATIONS
from vitscale.evaluation.trained_model import SourceRun, TrainedModel, open_model
from vitscale.tracking.journal import JOURNAL_NAME, read_rows
from vitscale.tracking.mlflow_sync import VAL_DATA_TAG, MlflowRun, read_record
from vitscale.tracking.settings import sqlite_path
from vitscale.tracking.tracker import Tracker

RESULTS = "results.json"
# Of MLflow: the run of the training, of its evaluations.
PARENT_TAG = "mlflow.parentRunId"
# Below the folder of results; the folder of an earlier evaluation is removed.
PROBED = f"{FILES}/linear_model"
HEADINGS = ("image size", "evaluation", "metric", "value", "95 % interval", "images")


class Row(NamedTuple):
    """A metric of an evaluation."""

    image_size: int
    evaluation: str
    metric: str
    value: float
    low: float | None = None
    """Of a share of images, as `high` and `images`: the bounds of its 95 % interval."""
    high: float | None = None
    images: int | None = None


def check_folder(folder: Path) -> None:
    """Raise UserError for the run folder of a training, whose journal would be replaced."""
    if (folder / "checkpoints").exists():
        raise UserError(
            "is the run folder of a training",
            where=folder,
            next_step="set output, or name, to another folder",
        )


def check_results(path: Path, description: Mapping[str, Any]) -> None:
    """Raise UserError if the results at `path` have another description."""
    old_values = json.loads(path.read_text())
    # As JSON, since tuples and lists are the same there.
    new_values = json.loads(json_text(description))
    changes = changed_settings(old_values, new_values, purpose="evaluation")
    if not changes:
        return
    rows = [
        f"\n    {key}: there {shorten(old or 'unknown')}, now {shorten(new or 'nothing')}"
        for key, (old, new) in changes.items()
    ]
    raise UserError(
        f"has the results of another evaluation{''.join(rows)}",
        where=path.parent,
        next_step="choose a name for this one (name=...)",
    )


def evaluate_run(run: EvaluateRun, world: World) -> None:
    """Evaluate, print and write the results. Collective.

    Raises UserError before any work where model, shards and evaluations do not fit.
    """
    folder = Path(run.folder)
    say: Callable[[str], None] = print if world.is_first else lambda _: None
    model = open_model(**run.source(), world=world)
    subject = _subject(run, model, world)

    # All checks come before the folder is touched: its results may be the only ones.
    evaluations = [EVALUATIONS[settings.name](settings) for settings in run.evaluate]
    matches = {evaluation.check(subject) for evaluation in evaluations}

    # The same folder may be used again, but only for the same evaluation.
    description = describe(run, model, subject.val)
    if run.output is None and (folder / RESULTS).exists():
        check_results(folder / RESULTS, description)

    say(f"evaluating {model.source}")
    for match in sorted(matches - {""}):
        say(f"the classes of model and shards: {match}")
    for part in subject.train:
        if part.note:
            say(part.note)
    if subject.train:
        say(
            f"probes learn from {subject.num_train:,} images of {run.data.train_split!r}"
        )

    with (
        run_folder_lock(folder, world=world),
        open_tracker(run, model, subject.val, world) as tracker,
    ):
        # Files of an evaluation that is no longer in the list would look like its results.
        if world.is_first:
            shutil.rmtree(folder / FILES, ignore_errors=True)
        # The first result may take minutes, so a person reads here what is coming.
        names = ", ".join(settings.name for settings in run.evaluate)
        images = f"{subject.val.num_samples} images of {run.data.evaluated}"
        say(f"{subject.image_size} px: {images}; {names}")

        # One line when each is done, as probes take minutes.
        rows: list[Row] = []
        start = time.perf_counter()
        for settings, metrics in zip(
            run.evaluate, results(evaluations, subject), strict=True
        ):
            rows += as_rows(settings.name, metrics, image_size=subject.image_size)
            seconds = time.perf_counter() - start
            say(f"{subject.image_size} px: {settings.name} after {seconds:.1f} s")

        # The results become a point of the training's own curve, at the checkpoint's step.
        tracker.log(
            {f"val/{row.metric}": row.value for row in rows},
            step=model.run.checkpoint.step if model.run else 0,
        )
        if world.is_first:
            write_results(folder, rows, description=description)
            for evaluation in evaluations:
                if isinstance(evaluation, LinearHeads):
                    write_probed_model(folder / PROBED, model, evaluation, subject)
    # The tracker has sent the points, and its run is there.
    if world.is_first and model.run is not None:
        log_model(run, model.run)
    if (folder / PROBED).is_dir():
        say(f"\nthe model with its linear head: init={folder / PROBED}")
    say(f"\n{table(rows)}\n\nresults: {folder / RESULTS}, .csv, .md")


def _subject(run: EvaluateRun, model: TrainedModel, world: World) -> Subject:
    """The model beside the splits that it is evaluated on. Collective."""
    # One process of a node opens the splits, and the others read what it has cached.
    train, val = once_per_node(
        lambda: splits(run),
        is_maker=world.local_rank == 0,
        gather=gather_objects,
    )

    # Compiling a model pays off only over many images.
    num_images = sum(split.num_samples for split in (*train, val))

    # The images are read as the model expects them, whatever the run's data say.
    data = model.preprocessing.settings(
        batch=run.compute.batch,
        num_workers=run.data.num_workers,
        remote=run.data.remote,
    )
    return Subject(
        model=model.for_inference(
            world, precision=run.compute.precision, num_images=num_images
        ),
        train=train,
        val=val,
        data=data,
        image_size=model.preprocessing.image_size,
        micro_batch=run.compute.batch,
        num_outputs=model.num_classes,
        classes=model.classes,
        folder=Path(run.folder) / FILES,
        draws=True,
    )


def splits(run: EvaluateRun) -> tuple[tuple[SplitIndex, ...], SplitIndex]:
    """Open the splits that probes learn from (none without a probe) and the evaluated split.

    Raises UserError.
    """
    data = DataSettings(global_batch=run.compute.batch, **run.data.model_dump())
    needs = {EVALUATIONS[settings.name].needs for settings in run.evaluate}
    val = None
    parts: tuple[SplitIndex, ...] = ()
    if needs != {"logits"} or data.val_split is None:
        # As a training opens them; the seed decides the order alone.
        opened = open_training_set(data, seed=0)
        val = opened.dev
        if needs != {"logits"}:
            parts = opened.parts
    if data.val_split is not None:
        val = open_val_split(data)
    assert val is not None
    return parts, val


def describe(run: EvaluateRun, model: TrainedModel, val: SplitIndex) -> dict[str, Any]:
    """Describe the evaluated model and data, as JSON values."""
    model_values = {
        "source": model.source,
        "step": model.run.checkpoint.step if model.run else None,
        "architecture": model.arch.description(),
        "precision": run.compute.precision,
        "averaged": model.run is not None and model.run.averaged,
        "preprocessing": model.preprocessing.data_values(),
    }
    data_values = {
        "path": str(val.folder),
        "split": run.data.val_split or run.data.evaluated,
        "images": val.num_samples,
        "fingerprint": val.fingerprint,
        "classes": len(val.classes),
    }

    # A choice that keeps every sample is left out, so that a new key does not make older results
    # those of another evaluation.
    data_values |= run.data.model_dump(
        mode="json", include=set(CHOOSING), exclude_defaults=True
    )
    return {
        "name": run.name,
        "model": model_values,
        "data": data_values,
        "evaluate": [
            settings.model_dump(mode="json", exclude={"every_steps"})
            for settings in run.evaluate
        ],
    }


def open_tracker(
    run: EvaluateRun, model: TrainedModel, val: SplitIndex, world: World
) -> Tracker:
    """Open the MLflow run of an evaluation, a child of the training in the same store.

    Collective.
    """
    # Without this the other ranks would wait for one that cannot write.
    with errors_on_all_ranks("cannot be written", run.folder, tried=world.is_first):
        if world.is_first:
            write_text(Path(run.folder) / "config.yaml", run_to_yaml(run))
        return Tracker(
            run.folder,
            settings=run.tracking,
            name=run.name,
            stage=run.stage,
            tags={"vitscale.evaluated": model.source, VAL_DATA_TAG: val.title},
            resume_step=-1,
            is_writer=world.is_first,
            origin=None if model.run is None else str(model.run.folder),
        )


def log_model(run: EvaluateRun, source: SourceRun) -> None:
    """Record an evaluated checkpoint as a model of MLflow with the metrics of this evaluation.

    A failure is a warning, since the results are on disk.
    """
    folder = Path(run.folder)
    record = read_record(folder)
    # Jobs of a cluster cannot share a database in a file.
    is_job = "SLURM_JOB_ID" in os.environ
    if record is None or record.uri is None or (is_job and sqlite_path(record.uri)):
        return
    try:
        tracked = MlflowRun(folder, record.uri, say=print)
        stored = tracked.client.get_run(tracked.run_id)
        training_id = stored.data.tags.get(PARENT_TAG, tracked.run_id)
        logged = tracked.client.create_logged_model(
            stored.info.experiment_id,
            # Its names have no dots.
            f"{run.name}-{source.checkpoint.step}".replace(".", "-"),
            source_run_id=training_id,
            tags={"vitscale.checkpoint": str(source.checkpoint.folder)},
        )

        # The run has the same points already, which MLflow does not repeat.
        for row, _ in read_rows(folder / JOURNAL_NAME):
            for key, value in row.metrics.items():
                tracked.client.log_metric(
                    tracked.run_id,
                    key,
                    value,
                    timestamp=int(row.time * 1000),
                    step=row.step,
                    model_id=logged.model_id,
                )
        tracked.client.finalize_logged_model(logged.model_id, "READY")
    except Exception as error:
        print(f"warning: no model was recorded in MLflow ({short_reason(error)})")


def write_probed_model(
    folder: Path, model: TrainedModel, evaluation: LinearHeads, subject: Subject
) -> None:
    """Write the frozen model with the best linear head, which `init` of other commands reads.

    Nothing for a head on features that no model of the family vit hands to a single head.
    """
    head_CD1 = evaluation.best_CD1
    arch: Any = model.arch
    if head_CD1 is None or arch.name != "vit" or arch.distillation_token:
        return

    # The head sees what the probe saw, so a representation layer goes.
    num_classes, width = head_CD1.shape
    network: Any = model.network
    network.head = nn.Linear(width - 1, num_classes)
    weights = {"weight": head_CD1[:, :-1], "bias": head_CD1[:, -1]}
    network.head.load_state_dict(weights)

    keys = {"num_classes": num_classes, "representation_layer": False}
    probed = replace(
        model,
        arch=arch.model_copy(update=keys),
        classes=subject.val.classes,
        independent=False,
    )
    folder.mkdir(parents=True, exist_ok=True)
    SafetensorsFormat().write(probed, folder)


# ---- the table -----------------------------------------------------------------------------------


def as_rows(
    evaluation: str, metrics: Mapping[str, float], *, image_size: int
) -> list[Row]:
    rows = []
    for metric, value in metrics.items():
        row = Row(image_size, evaluation, metric, float(value))
        # The interval of a share follows from the number of its images.
        if isinstance(value, Share):
            low, high = value.interval()
            row = row._replace(low=low, high=high, images=value.images)
        rows.append(row)
    return rows


def table(rows: Sequence[Row]) -> str:
    """Markdown with aligned columns, then why a metric has no interval."""
    # Aligned, so that the same text reads well in a terminal and on a web page.
    cells = [HEADINGS, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, tuple("-" * width for width in widths))
    lines = [f"| {' | '.join(map(str.ljust, line, widths))} |" for line in cells]
    for reason in _reasons(rows):
        lines.append(f"\n{reason}")
    return "\n".join(lines)


def write_results(
    folder: Path, rows: Sequence[Row], *, description: Mapping[str, Any]
) -> None:
    """Write results.json, with `description`, results.csv and results.md."""
    # JSON has no NaN, the one value that differs from itself.
    valid = [
        {key: None if cell != cell else cell for key, cell in row._asdict().items()}
        for row in rows
    ]
    write_json(folder / RESULTS, {**description, "results": valid})
    write_text(folder / "results.csv", csv_text([Row._fields, *rows]))
    write_text(folder / "results.md", table(rows) + "\n")


def _reasons(rows: Sequence[Row]) -> Iterator[str]:
    """Explain missing intervals: Wilson's is for a single share of one set of images."""
    without = [row.metric for row in rows if row.low is None]
    if "class_mean_top1" in without:
        yield "class_mean_top1 has no interval: it is a mean over classes"
    # Its spread over draws is a metric of its own and says more than an interval would.
    few_shot = [metric for metric in without if metric.startswith("few_shot")]
    if any(metric.endswith("_top1") for metric in few_shot):
        yield "few_shotK_top1 has no interval: it is a mean over draws, with few_shotK_std"


def _cells(row: Row) -> tuple[str, ...]:
    interval = ""
    images = ""
    if row.low is not None and row.high is not None:
        interval = f"{_spelled(row.low)} to {_spelled(row.high)}"
        images = str(row.images)
    return (
        str(row.image_size),
        row.evaluation,
        row.metric,
        _spelled(row.value),
        interval,
        images,
    )


def _spelled(value: float) -> str:
    # Fixed digits would show a small loss as 0.0000, and a large one with digits of no meaning.
    if 0 < abs(value) < 0.001:
        return f"{value:.1e}"
    if abs(value) >= 100 and math.isfinite(value):
        return f"{value:.1f}"
    return f"{value:.4f}"
