"""Log an exported folder as a model of the MLflow run that trained it, and register it.

Owns: MLflow's model around the folder (signature, code, requirements), and sending it.
Leaves out: writing the folder (`finetune/exporting`), loading it again (`image_model`).

The model is the folder's safetensors and a copy of our code: no pickle, and no installation of
vitscale where it is loaded.
"""

from __future__ import annotations

import re
import tempfile
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.exporting.settings import ExportRun
from finetune.loading.loaded_model import LoadedModel
from vitscale.config.errors import UserError
from vitscale.config.redaction import redact, short_reason
from vitscale.images.size import rows_and_columns
from vitscale.tracking.mlflow_client import active_run, open_client, read_link

if TYPE_CHECKING:
    from mlflow.models import ModelSignature
    from mlflow.tracking import MlflowClient

PROJECT_ROOT = Path(__file__).resolve().parents[2]
CODE = ("finetune", "vitscale")
# What the loader imports beside MLflow's own requirements.
PACKAGES = (
    "torch", "numpy", "safetensors", "pydantic", "PyYAML", "pillow", "simplejpeg", "pyarrow",
    "blake3", "fsspec",
)  # fmt: skip
REFUSED_IN_NAMES = re.compile(r"[/:.%\"']")


def trained_run(loaded: LoadedModel) -> dict[str, str]:
    """The link to the MLflow run that trained the model. Raises UserError if there is none."""
    link = None if loaded.trained is None else read_link(loaded.trained.run_folder)
    if link is None:
        raise UserError(
            "no MLflow run trained this model",
            where=f"mlflow: {loaded.source}",
            allowed="a run folder with mlflow.json",
            next_step="python launch/compare.py sync RUN copies a run folder into MLflow; or "
            "export without mlflow=true",
        )
    return link


def log_model(run: ExportRun, loaded: LoadedModel) -> str:
    """Log the exported folder; returns what was done. Raises UserError where the store fails."""
    link = trained_run(loaded)
    try:
        client = open_client(link["uri"], say=print)
        known = active_run(client, link["run_id"])
        if known is None:
            what = f"the MLflow run {link['run_id']} was deleted"
            raise UserError(what, where=redact(link["uri"]), next_step="export without mlflow=true")
        model_id = _log(client, known, run, loaded)
        said = f"logged as models:/{model_id}, of MLflow run {known.info.run_id}"
        if run.register_as is None:
            return said
        made = _register(client, known, model_id, name=run.register_as, uri=link["uri"])
        return f"{said}\n{made}"
    except UserError:
        raise
    # Any failure of a server or its database is reported as a problem of the store.
    except Exception as error:
        raise UserError(
            f"MLflow did not take the model: {short_reason(error)}",
            where=redact(link["uri"]),
            next_step=f"the exported folder {run.output} is complete; export again with another "
            "output when the store answers",
        ) from None


def _log(client: MlflowClient, known: Any, run: ExportRun, loaded: LoadedModel) -> str:
    from mlflow.entities import LoggedModelOutput

    model = client.create_logged_model(
        known.info.experiment_id,
        name=REFUSED_IN_NAMES.sub("-", Path(run.output).name),
        source_run_id=known.info.run_id,
        params={"source": redact(loaded.source), "model": loaded.arch.name},
        model_type="image classifier" if loaded.num_classes else "image encoder",
    )
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model")
            _write(path, run, loaded, model_id=model.model_id, run_id=known.info.run_id)
            client.log_model_artifacts(model.model_id, str(path))
        client.finalize_logged_model(model.model_id, "READY")
    except BaseException:
        client.finalize_logged_model(model.model_id, "FAILED")
        raise
    output = LoggedModelOutput(model.model_id, step=loaded.step or 0)
    client.log_outputs(known.info.run_id, models=[output])
    return str(model.model_id)


def _write(path: Path, run: ExportRun, loaded: LoadedModel, *, model_id: str, run_id: str) -> None:
    from mlflow.models import Model
    from mlflow.pyfunc import save_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it asks for an example of the input
        save_model(
            path,
            loader_module="finetune.serving.image_model",
            data_path=run.output,
            code_paths=[str(PROJECT_ROOT / name) for name in CODE],
            mlflow_model=Model(model_id=model_id, run_id=run_id),
            signature=_signature(loaded),
            pip_requirements=list(filter(None, map(_pinned, PACKAGES))),
            metadata={"classes": list(loaded.classes or ())},
        )


def _signature(loaded: LoadedModel) -> ModelSignature:
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    rows, columns = rows_and_columns(loaded.preprocessing.image_size)
    images = TensorSpec(np.dtype(np.uint8), (-1, rows, columns, 3), name=None)
    logits = TensorSpec(np.dtype(np.float32), (-1, loaded.num_classes or -1), name=None)
    return ModelSignature(inputs=Schema([images]), outputs=Schema([logits]))


def _pinned(package: str) -> str | None:
    try:
        return f"{package}=={version(package).partition('+')[0]}"
    except PackageNotFoundError:
        return None


def _register(client: MlflowClient, known: Any, model_id: str, *, name: str, uri: str) -> str:
    import mlflow
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    mlflow.set_tracking_uri(uri)  # the registry resolves models:/ID by it, not by the client
    made = client.create_model_version(
        name, source=f"models:/{model_id}", run_id=known.info.run_id, model_id=model_id
    )
    return f"registered as models:/{name}/{made.version}"
