"""The MLflow tags of an evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finetune.inference.settings import EvaluateRun
from finetune.inference.tracking import check_folder, tags_of
from vitscale.config.errors import UserError

STORE = "sqlite:////stores/mlflow.db"
LINK = {"uri": STORE, "experiment": "vitscale", "run_id": "abc"}
SAID = {"vitscale.evaluated": "runs/x, step 3", "vitscale.evaluated_run_id": "abc"}


@pytest.mark.parametrize(
    ("uri", "expected"),
    [(STORE, SAID | {"mlflow.parentRunId": "abc"}), ("sqlite:////other.db", SAID), (None, SAID)],
)
def test_the_training_is_the_parent_in_its_own_store(
    tmp_path: Path, uri: str | None, expected: dict[str, str]
) -> None:
    (tmp_path / "mlflow.json").write_text(json.dumps(LINK))
    run = EvaluateRun.model_validate(
        {
            "name": "x",
            "init": "runs/x",
            "data": {"path": "shards"},
            "evaluate": [{"name": "classification"}],
            "tracking": {"uri": uri},
        }
    )
    loaded: Any = SimpleNamespace(
        source="runs/x, step 3", trained=SimpleNamespace(run_folder=tmp_path)
    )
    assert tags_of(run, loaded) == expected


def test_the_folder_of_a_training_is_refused(tmp_path: Path) -> None:
    check_folder(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match="run folder of a training"):
        check_folder(tmp_path)
