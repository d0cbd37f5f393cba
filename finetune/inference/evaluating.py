"""Evaluate a trained model on a folder of shards."""

from __future__ import annotations

from collections.abc import Iterator

from finetune.inference.settings import EvaluateRun
from finetune.loading.loaded_model import LoadedModel
from vitscale.data.index import read_split
from vitscale.data.settings import DataSettings
from vitscale.distributed.world import World
from vitscale.evaluation.interface.evaluation import Subject
from vitscale.evaluation.registry import EVALUATIONS


def evaluations(run: EvaluateRun, loaded: LoadedModel, world: World) -> Iterator[dict[str, float]]:
    """Metrics of each evaluation, by name. Collective; equal on every rank."""
    settings = data_settings(run, loaded)
    train, val = (
        read_split(run.data.path, split=split, remote_settings=run.data.remote)
        for split in (run.data.train_split, run.data.val_split)
    )
    subject = Subject(
        model=loaded.for_inference(world, precision=run.compute.precision),
        train=(train,),
        val=val,
        data=settings,
        image_size=loaded.preprocessing.image_size,
        micro_batch=run.compute.batch,
    )
    for each in run.evaluate:
        yield EVALUATIONS[each.name](each).metrics(subject)


def data_settings(run: EvaluateRun, loaded: LoadedModel) -> DataSettings:
    """The run's shards, read as the model expects its images."""
    return DataSettings(
        path=run.data.path,
        train_split=run.data.train_split,
        val_split=run.data.val_split,
        global_batch=run.compute.batch,
        num_workers=run.data.num_workers,
        timeout_s=run.data.timeout_s,
        remote=run.data.remote,
        **loaded.preprocessing.data_values(),
    )
