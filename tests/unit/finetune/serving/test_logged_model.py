"""A logged model loads in MLflow and gives the logits of the model that was exported."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from finetune.exporting.folder import write_folder
from finetune.exporting.settings import ExportRun
from finetune.loading.loaded_model import LoadedModel
from finetune.serving.logged_model import log_model
from tests.support.engine.mlflow_store import query
from tests.support.engine.small_models import small_model
from vitscale.config.errors import UserError
from vitscale.distributed.atomic_files import write_json
from vitscale.evaluation.models.trained_model import TrainedModel
from vitscale.tracking.mlflow_client import experiment_id, open_client

# A process that has neither our code nor the checkout.
LOAD = """
import sys
import mlflow, numpy as np
mlflow.set_tracking_uri(sys.argv[1])
model = mlflow.pyfunc.load_model(sys.argv[2])
np.save(sys.argv[4], model.predict(np.load(sys.argv[3])))
import vitscale
assert sys.argv[5] not in vitscale.__file__, vitscale.__file__
"""


def export_run(folder: Path, **changes: Any) -> ExportRun:
    values = {"init": "x", "to": "safetensors", "output": str(folder / "small.v1"), "mlflow": True}
    return ExportRun(**(values | changes))


def of_run(loaded: LoadedModel, run_folder: Path) -> LoadedModel:
    trained = TrainedModel(
        run_folder=run_folder,
        config={"name": "small"},
        settings=loaded.settings,
        arch=loaded.arch,
        preprocessing=loaded.preprocessing,
        classes=loaded.classes,
        description={},
    )
    return replace(loaded, trained=trained, step=7)


@pytest.mark.slow
def test_a_logged_model_gives_the_same_logits(tmp_path: Path) -> None:
    database = tmp_path / "mlflow.db"
    uri = f"sqlite:///{database}"
    client = open_client(uri, say=print)
    experiment = experiment_id(client, "a", uri=uri)
    run_id = client.create_run(experiment).info.run_id
    client.set_terminated(run_id)
    write_json(tmp_path / "mlflow.json", {"uri": uri, "run_id": run_id, "experiment": "a"})
    how = {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.3, 0.4)}
    loaded = of_run(small_model(preprocessing=how, classes=tuple("abcde")), tmp_path)
    run = export_run(tmp_path, register_as="digits")
    list(write_folder(run, loaded))
    said = log_model(run, loaded)
    assert "registered as models:/digits/1" in said and run_id in said
    assert "registered as models:/digits/2" in log_model(run, loaded)

    images = np.random.default_rng(0).integers(0, 256, (3, 16, 16, 3), dtype=np.uint8)
    np.save(tmp_path / "images.npy", images)
    root = str(Path(__file__).resolve().parents[4])
    arguments = [uri, "models:/digits/1", *(str(tmp_path / n) for n in ("images.npy", "out.npy"))]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", LOAD, *arguments, root],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    normalised = (images.transpose(0, 3, 1, 2) / 255 - np.reshape(how["mean"], (3, 1, 1))) / (
        np.reshape(how["std"], (3, 1, 1))
    )
    with torch.no_grad():
        expected = loaded.network(torch.from_numpy(normalised).float()).numpy()
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected, atol=1e-4)

    folder = next((tmp_path / "mlflow-artifacts/models").glob("*/artifacts"))
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert not [p for p in files if p.suffix in (".pkl", ".pickle", ".pt", ".pth", ".pyc")]
    described = (folder / "MLmodel").read_text()
    assert "signature" in described and "uint8" in described and "classes" in described
    models = query(database, "select source_run_id, name, status from logged_models")
    assert models == [(run_id, "small-v1", 2)] * 2


def test_a_model_without_an_mlflow_run_is_refused(tmp_path: Path) -> None:
    for loaded in (small_model(), of_run(small_model(), tmp_path)):
        with pytest.raises(UserError, match="no MLflow run trained this model"):
            log_model(export_run(tmp_path), loaded)


def test_a_store_that_is_away_is_named(tmp_path: Path) -> None:
    uri = "nonsense://host"
    write_json(tmp_path / "mlflow.json", {"uri": uri, "run_id": "e" * 32, "experiment": "a"})
    with pytest.raises(UserError, match="MLflow did not take the model"):
        log_model(export_run(tmp_path), of_run(small_model(), tmp_path))


@pytest.mark.parametrize("changes", [{"to": "timm"}, {"mlflow": False, "register_as": "x"}])
def test_settings_that_do_not_fit_are_problems(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert len(list(export_run(tmp_path, **changes).problems())) == 1
