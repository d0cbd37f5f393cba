"""Evaluate a trained model on a folder of shards: one table, and an MLflow run."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from finetune.results import Row, as_rows, text_table, write_results
from finetune.settings import EvaluateRun
from vitscale.checkpoint.run_lock import run_folder_lock
from vitscale.config.errors import UserError
from vitscale.config.loader import run_to_yaml
from vitscale.data.index import SplitIndex, read_split
from vitscale.data.settings import DataSettings
from vitscale.distributed.atomic_files import write_text
from vitscale.distributed.node_files import once_per_node
from vitscale.distributed.world import World, gather_objects
from vitscale.evaluation.evaluation import FILES, Subject, results
from vitscale.evaluation.registry import EVALUATIONS
from vitscale.evaluation.trained_model import TrainedModel, open_model
from vitscale.tracking.tracker import Tracker


def check_folder(folder: Path) -> None:
    """Raise UserError for the run folder of a training, whose journal would be replaced."""
    if (folder / "checkpoints").exists():
        raise UserError(
            "is the run folder of a training",
            where=str(folder),
            next_step="set output, or name, to another folder",
        )


def evaluate_run(run: EvaluateRun, world: World) -> None:
    """Evaluate, print and write the results. Collective.

    Raises UserError before any work where model, shards and evaluations do not fit.
    """
    folder = Path(run.folder)
    say: Callable[[str], None] = print if world.is_first else lambda _: None
    model = open_model(**run.source())
    train, val = once_per_node(
        lambda: splits(run, check_files=world.is_first),
        is_maker=world.local_rank == 0,
        gather=gather_objects,
    )
    subject = Subject(
        model=model.for_inference(world, precision=run.compute.precision),
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
    for each in evaluations:
        each.check(subject)
    say(f"evaluating {model.source}")
    with run_folder_lock(folder, world=world), open_tracker(run, model, world) as tracker:
        if world.is_first:
            shutil.rmtree(folder / FILES, ignore_errors=True)
        names = ", ".join(each.name for each in run.evaluate)
        say(f"{subject.image_size} px: {val.num_samples} images; {names}")
        rows, start = list[Row](), time.perf_counter()
        for settings, metrics in zip(run.evaluate, results(evaluations, subject), strict=True):
            rows += as_rows(settings.name, metrics, image_size=subject.image_size)
            seconds = time.perf_counter() - start
            say(f"{subject.image_size} px: {settings.name} after {seconds:.1f} s")
        tracker.log(
            {f"val/{row['metric']}": row["value"] for row in rows},
            step=model.run.checkpoint.step if model.run else 0,
        )
        if world.is_first:
            write_results(folder, rows, description=describe(run, model, val))
    say(f"\n{text_table(rows)}\n\nresults: {folder}/results.json, .csv, .md")


def splits(run: EvaluateRun, *, check_files: bool) -> tuple[tuple[SplitIndex, ...], SplitIndex]:
    """What probes learn from, empty without a probe, and what the metrics are of.

    check_files: False where another rank checks that the shards are there. Raises UserError.
    """
    data = run.data
    read = partial(read_split, data.path, remote_settings=data.remote, check_files=check_files)
    val = read(split=data.val_split, key="data.val_split")
    if all(EVALUATIONS[each.name].needs == "logits" for each in run.evaluate):
        return (), val
    return (read(split=data.train_split, key="data.train_split"),), val


def describe(run: EvaluateRun, model: TrainedModel, val: SplitIndex) -> dict[str, Any]:
    """What the results are of, as JSON values."""
    return {
        "name": run.name,
        "model": {
            "source": model.source,
            "step": model.run.checkpoint.step if model.run else None,
            "architecture": model.arch.description(),
            "precision": run.compute.precision,
        },
        "data": {
            "path": str(val.folder),
            "split": val.split,
            "images": val.num_samples,
            "fingerprint": val.fingerprint,
            "classes": len(val.classes),
        },
        "evaluate": [
            each.model_dump(mode="json", exclude={"every_steps"}) for each in run.evaluate
        ],
    }


def open_tracker(run: EvaluateRun, model: TrainedModel, world: World) -> Tracker:
    """Open the MLflow run of an evaluation: a child of the training, in the same store."""
    if world.is_first:
        write_text(Path(run.folder) / "config.yaml", run_to_yaml(run))
    return Tracker(
        run.folder,
        settings=run.tracking,
        name=run.name,
        stage=run.stage,
        tags={"vitscale.evaluated": model.source},
        resume_step=0,
        is_writer=world.is_first,
        origin=None if model.run is None else str(model.run.folder),
    )
