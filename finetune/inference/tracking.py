"""The MLflow run of an evaluation, a child of the run that trained the model."""

from __future__ import annotations

from pathlib import Path

from finetune.inference.settings import EvaluateRun
from finetune.loading.loaded_model import LoadedModel
from vitscale.config.errors import UserError
from vitscale.config.loader import run_to_yaml
from vitscale.config.redaction import redact
from vitscale.distributed.world import World
from vitscale.tracking.mlflow_store import read_link
from vitscale.tracking.run_facts import absolute_uri
from vitscale.tracking.tracker import Tracker


def check_folder(folder: Path) -> None:
    """Raise UserError for the run folder of a training, whose journal would be replaced."""
    if (folder / "checkpoints").exists():
        raise UserError(
            "is the run folder of a training",
            where=str(folder),
            next_step="set output, or name, to another folder",
        )


def open_tracker(run: EvaluateRun, loaded: LoadedModel, world: World) -> Tracker:
    return Tracker.open(
        folder=run.folder,
        settings=run.tracking,
        run_name=run.name,
        stage=run.stage,
        params=run.model_dump(mode="json"),
        tags=tags_of(run, loaded),
        config_yaml=run_to_yaml(run),
        resume_step=0,
        is_writer=world.is_first,
    )


def tags_of(run: EvaluateRun, loaded: LoadedModel) -> dict[str, str]:
    """What was evaluated; MLflow's parent too, where the same store has the training."""
    tags = {"vitscale.evaluated": loaded.source}
    link = None if loaded.trained is None else read_link(loaded.trained.run_folder)
    if link is not None:
        tags["vitscale.evaluated_run_id"] = link["run_id"]
        uri = run.tracking.uri
        if uri is not None and link.get("uri") == redact(absolute_uri(uri)):
            tags["mlflow.parentRunId"] = link["run_id"]
    return tags
