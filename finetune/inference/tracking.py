"""The MLflow run of an evaluation, a child of the run that trained the model."""

from __future__ import annotations

from pathlib import Path

from finetune.inference.settings import EvaluateRun
from finetune.loading.loaded_model import LoadedModel
from vitscale.config.errors import UserError
from vitscale.config.loader import run_to_yaml
from vitscale.distributed.world import World
from vitscale.tracking.parent_run import origin_tags
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
    if loaded.trained is not None:
        uri, folder = run.tracking.uri, loaded.trained.run_folder
        tags |= origin_tags(folder, uri=uri, tag="vitscale.evaluated_run_id")
    return tags
