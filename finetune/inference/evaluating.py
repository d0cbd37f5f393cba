"""Evaluate a trained model on a folder of shards."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from finetune.inference.results import EvaluationResult, as_results
from finetune.inference.settings import EvaluateRun
from finetune.loading.loaded_model import LoadedModel
from vitscale.data.index import SplitIndex, read_split
from vitscale.data.settings import DataSettings
from vitscale.distributed.world import World
from vitscale.evaluation.interface.evaluation import FILES, Subject
from vitscale.evaluation.interface.one_pass import results
from vitscale.evaluation.registry import EVALUATIONS


def splits(
    run: EvaluateRun, *, check_files: bool = True
) -> tuple[tuple[SplitIndex, ...], SplitIndex]:
    """What probes learn from, empty without a probe, and what the metrics are of.

    check_files: False where another rank checks that the shards are there. Raises UserError.
    """
    read = partial(
        read_split, run.data.path, remote_settings=run.data.remote, check_files=check_files
    )
    val = read(split=run.data.val_split, key="data.val_split")
    if all(EVALUATIONS[each.name].needs == "logits" for each in run.evaluate):
        return (), val
    return (read(split=run.data.train_split, key="data.train_split"),), val


def check(
    run: EvaluateRun,
    loaded: LoadedModel,
    world: World,
    *,
    train: tuple[SplitIndex, ...],
    val: SplitIndex,
) -> None:
    """Raise UserError where model, shards and evaluations do not fit."""
    subject = subject_of(run, loaded, world, train=train, val=val)
    for each in run.evaluate:
        EVALUATIONS[each.name](each).check(subject)


def evaluate_all(
    run: EvaluateRun,
    loaded: LoadedModel,
    world: World,
    *,
    train: tuple[SplitIndex, ...],
    val: SplitIndex,
    say: Callable[[str], None],
) -> list[EvaluationResult]:
    """Return the results, equal on every rank. Collective; the caller has called `check`."""
    evaluations = [EVALUATIONS[each.name](each) for each in run.evaluate]
    subject = subject_of(run, loaded, world, train=train, val=val)
    rows, shown = [], f"{subject.image_size} px"
    names = ", ".join(each.settings.name for each in evaluations)
    say(f"{shown}: {val.num_samples} images; {names}")
    start = time.perf_counter()
    for each, metrics in zip(evaluations, results(evaluations, subject), strict=True):
        rows += as_results(each.settings.name, metrics, image_size=subject.image_size)
        say(f"{shown}: {each.settings.name} after {time.perf_counter() - start:.1f} s")
    return rows


def describe(run: EvaluateRun, loaded: LoadedModel, val: SplitIndex) -> dict[str, Any]:
    """What the results are of, as JSON values."""
    return {
        "name": run.name,
        "model": {
            "source": loaded.source,
            "step": loaded.step,
            "architecture": loaded.arch.description(),
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


def subject_of(
    run: EvaluateRun,
    loaded: LoadedModel,
    world: World,
    *,
    train: tuple[SplitIndex, ...],
    val: SplitIndex,
) -> Subject:
    return Subject(
        model=loaded.for_inference(world, precision=run.compute.precision),
        train=train,
        val=val,
        data=data_settings(run, loaded),
        image_size=loaded.preprocessing.image_size,
        micro_batch=run.compute.batch,
        num_outputs=loaded.num_classes,
        classes=loaded.classes,
        folder=Path(run.folder) / FILES,
    )


def data_settings(run: EvaluateRun, loaded: LoadedModel) -> DataSettings:
    """The run's shards, read as the model expects its images."""
    return DataSettings(
        path=run.data.path,
        train_split=run.data.train_split,
        val_split=run.data.val_split,
        global_batch=run.compute.batch,
        num_workers=run.data.num_workers,
        remote=run.data.remote,
        **loaded.preprocessing.data_values(),
    )
