"""Upload an exported folder to the MLflow run that trained the model."""

from __future__ import annotations

from pathlib import Path

from finetune.exporting.settings import ExportRun
from finetune.loading.loaded_model import LoadedModel
from vitscale.config.errors import UserError
from vitscale.tracking.mlflow_client import read_link
from vitscale.tracking.mlflow_run import upload_to_linked_run


def check_linked(loaded: LoadedModel) -> None:
    """Raise UserError unless an MLflow run trained the model."""
    if loaded.trained is None or read_link(loaded.trained.run_folder) is None:
        raise UserError(
            "no MLflow run trained this model",
            where=f"mlflow: {loaded.source}",
            allowed="a run folder with mlflow.json",
            next_step="python launch/compare.py sync RUN copies a run folder into MLflow; or "
            "export without mlflow=true",
        )


def upload(run: ExportRun, loaded: LoadedModel) -> None:
    """Upload the files; says what was done. A failure is said: the folder is on disk."""
    assert loaded.trained is not None
    folder = Path(run.output)
    files = sorted(folder.iterdir())
    place = f"exported/{folder.name}"
    upload_to_linked_run(loaded.trained.run_folder, files, place=place, say=print)
