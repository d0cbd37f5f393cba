"""Evaluate a trained model on a folder of shards: one table (text, JSON, CSV, Markdown), and an
MLflow run."""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from finetune.settings import CHOOSING, EvaluateRun
from vitscale.checkpoint.store import run_folder_lock
from vitscale.config.changes import changed_settings
from vitscale.config.errors import UserError
from vitscale.config.loader import run_to_yaml, shorten
from vitscale.config.outside import csv_cell
from vitscale.data.index import SplitIndex
from vitscale.data.settings import DataSettings
from vitscale.data.training_set import open_training_set, open_val_split
from vitscale.distributed.atomic_files import json_text, write_json, write_text
from vitscale.distributed.node_files import once_per_node
from vitscale.distributed.world import World, errors_on_all_ranks, gather_objects
from vitscale.evaluation.evaluation import FILES, Share, Subject, results
from vitscale.evaluation.registry import EVALUATIONS
from vitscale.evaluation.trained_model import TrainedModel, open_model
from vitscale.tracking.tracker import Tracker

# A metric of an evaluation: image_size, evaluation, metric, value, and of a share of images the
# bounds of its 95 % interval (low, high) and their number (images), else None.
Row = dict[str, Any]
RESULTS = "results.json"
HEADINGS = ("image size", "evaluation", "metric", "value", "95 % interval", "images")


def check_folder(folder: Path) -> None:
    """Raise UserError for the run folder of a training, whose journal would be replaced."""
    if (folder / "checkpoints").exists():
        raise UserError(
            "is the run folder of a training",
            where=str(folder),
            next_step="set output, or name, to another folder",
        )


def check_results(path: Path, description: Mapping[str, Any]) -> None:
    """Raise UserError if the results at `path` have another description."""
    there, now = json.loads(path.read_text()), json.loads(json_text(description))
    changes = changed_settings(there, now, purpose="evaluation")
    if changes:
        rows = (
            f"\n    {key}: there {shorten(old or 'unknown')}, now {shorten(new or 'nothing')}"
            for key, (old, new) in changes.items()
        )
        raise UserError(
            f"has the results of another evaluation{''.join(rows)}",
            where=str(path.parent),
            next_step="choose a name for this one (name=...)",
        )


def evaluate_run(run: EvaluateRun, world: World) -> None:
    """Evaluate, print and write the results. Collective.

    Raises UserError before any work where model, shards and evaluations do not fit.
    """
    folder = Path(run.folder)
    say: Callable[[str], None] = print if world.is_first else lambda _: None
    model = open_model(**run.source(), world=world)
    train, val = once_per_node(
        lambda: splits(run),
        is_maker=world.local_rank == 0,
        gather=gather_objects,
    )
    num_images = sum(each.num_samples for each in (*train, val))
    subject = Subject(
        model=model.for_inference(
            world, precision=run.compute.precision, num_images=num_images
        ),
        train=train,
        val=val,
        # Read as the model expects its images.
        data=DataSettings(
            path=run.data.path,
            global_batch=run.compute.batch,
            num_workers=run.data.num_workers,
            remote=run.data.remote,
            **model.preprocessing.data_values(),
        ),
        image_size=model.preprocessing.image_size,
        micro_batch=run.compute.batch,
        num_outputs=model.num_classes,
        classes=model.classes,
        folder=folder / FILES,
    )
    evaluations = [EVALUATIONS[each.name](each) for each in run.evaluate]
    said = {each.check(subject) for each in evaluations} - {""}
    description = describe(run, model, val)
    if run.output is None and (folder / RESULTS).exists():
        check_results(folder / RESULTS, description)
    say(f"evaluating {model.source}")
    for how in sorted(said):
        say(f"the classes of model and shards: {how}")
    for part in train:
        if part.note:
            say(part.note)
    if train:
        say(
            f"probes learn from {subject.num_train:,} images of {run.data.train_split!r}"
        )
    with (
        run_folder_lock(folder, world=world),
        open_tracker(run, model, world) as tracker,
    ):
        if world.is_first:
            shutil.rmtree(folder / FILES, ignore_errors=True)
        names = ", ".join(each.name for each in run.evaluate)
        images = f"{val.num_samples} images of {run.data.evaluated}"
        say(f"{subject.image_size} px: {images}; {names}")
        rows, start = list[Row](), time.perf_counter()
        for settings, metrics in zip(
            run.evaluate, results(evaluations, subject), strict=True
        ):
            rows += as_rows(settings.name, metrics, image_size=subject.image_size)
            seconds = time.perf_counter() - start
            say(f"{subject.image_size} px: {settings.name} after {seconds:.1f} s")
        tracker.log(
            {f"val/{row['metric']}": row["value"] for row in rows},
            step=model.run.checkpoint.step if model.run else 0,
        )
        if world.is_first:
            write_results(folder, rows, description=description)
    say(f"\n{table(rows)}\n\nresults: {folder / RESULTS}, .csv, .md")


def splits(run: EvaluateRun) -> tuple[tuple[SplitIndex, ...], SplitIndex]:
    """Open the splits that probes learn from (none without a probe) and the evaluated split.

    Raises UserError.
    """
    data = DataSettings(global_batch=run.compute.batch, **run.data.model_dump())
    has_probe = any(EVALUATIONS[each.name].needs != "logits" for each in run.evaluate)
    if not has_probe and (val := open_val_split(data)):
        return (), val
    # As a training opens them; the seed decides the order alone.
    opened = open_training_set(data, seed=0)
    val = opened.dev if data.val_split is None else open_val_split(data)
    assert val is not None
    return opened.parts if has_probe else (), val


def describe(run: EvaluateRun, model: TrainedModel, val: SplitIndex) -> dict[str, Any]:
    """Describe the evaluated model and data, as JSON values."""
    chosen = run.data.model_dump(mode="json", include=set(CHOOSING))
    return {
        "name": run.name,
        "model": {
            "source": model.source,
            "step": model.run.checkpoint.step if model.run else None,
            "architecture": model.arch.description(),
            "precision": run.compute.precision,
            "averaged": model.run is not None and model.run.averaged,
            "preprocessing": model.preprocessing.data_values(),
        },
        "data": {
            "path": str(val.folder),
            "split": run.data.val_split or run.data.evaluated,
            "images": val.num_samples,
            "fingerprint": val.fingerprint,
            "classes": len(val.classes),
            **{
                key: value
                for key, value in chosen.items()
                if value not in (None, [], 0, 100)
            },
        },
        "evaluate": [
            each.model_dump(mode="json", exclude={"every_steps"})
            for each in run.evaluate
        ],
    }


def open_tracker(run: EvaluateRun, model: TrainedModel, world: World) -> Tracker:
    """Open the MLflow run of an evaluation, a child of the training in the same store.

    Collective.
    """
    with errors_on_all_ranks("cannot be written", run.folder, tried=world.is_first):
        if world.is_first:
            write_text(Path(run.folder) / "config.yaml", run_to_yaml(run))
        return Tracker(
            run.folder,
            settings=run.tracking,
            name=run.name,
            stage=run.stage,
            tags={"vitscale.evaluated": model.source},
            resume_step=-1,
            is_writer=world.is_first,
            origin=None if model.run is None else str(model.run.folder),
        )


# ---- the table -----------------------------------------------------------------------------------


def as_rows(
    evaluation: str, metrics: Mapping[str, float], *, image_size: int
) -> list[Row]:
    rows = []
    for metric, value in metrics.items():
        row: Row = {
            "image_size": image_size,
            "evaluation": evaluation,
            "metric": metric,
        }
        row |= {"value": float(value), "low": None, "high": None, "images": None}
        if isinstance(value, Share):
            row["low"], row["high"] = value.interval()
            row["images"] = value.images
        rows.append(row)
    return rows


def table(rows: Sequence[Row]) -> str:
    """Markdown with aligned columns, then why a metric has no interval."""
    lines = [HEADINGS, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, tuple("-" * width for width in widths))
    found = [f"| {' | '.join(map(str.ljust, line, widths))} |" for line in lines]
    return "\n".join([*found, *(f"\n{why}" for why in _reasons(rows))])


def write_results(
    folder: Path, rows: Sequence[Row], *, description: Mapping[str, Any]
) -> None:
    """Write results.json, with `description`, results.csv and results.md."""
    # JSON has no NaN.
    valid = [{key: None if x != x else x for key, x in row.items()} for row in rows]
    write_json(folder / RESULTS, {**description, "results": valid})
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: csv_cell(cell) for key, cell in row.items()} for row in rows)
    write_text(folder / "results.csv", file.getvalue())
    write_text(folder / "results.md", table(rows) + "\n")


def _reasons(rows: Sequence[Row]) -> Iterator[str]:
    """Explain missing intervals: Wilson's is for a single share of one set of images."""
    without = [row["metric"] for row in rows if row["low"] is None]
    if "class_mean_top1" in without:
        yield "class_mean_top1 has no interval: it is a mean over classes"
    if any(
        metric.startswith("few_shot") and metric.endswith("_top1") for metric in without
    ):
        yield "few_shotK_top1 has no interval: it is a mean over draws, with few_shotK_std"


def _cells(row: Row) -> tuple[str, ...]:
    interval = (
        ""
        if row["low"] is None
        else f"{_spelled(row['low'])} to {_spelled(row['high'])}"
    )
    images = "" if row["images"] is None else str(row["images"])
    first = (str(row["image_size"]), row["evaluation"], row["metric"])
    return (*first, _spelled(row["value"]), interval, images)


def _spelled(value: float) -> str:
    if 0 < abs(value) < 0.001:
        return f"{value:.1e}"
    return (
        f"{value:.4f}"
        if not math.isfinite(value) or abs(value) < 100
        else f"{value:.1f}"
    )
