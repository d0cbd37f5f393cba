"""Evaluations of features give equal metrics in training and outside, on any ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.ranks.fault_runs import FaultRuns, wait_all
from tests.support.ranks.rank_processes import ROOT
from tests.support.ranks.run_states import journal_rows

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

LINEAR = {"name": "linear_heads", "steps": 40, "batch": 64, "learning_rates": [0.001, 0.1]}
Evaluations = Sequence[Mapping[str, Any]]
EVALUATE: Evaluations = (
    {"name": "knn", "k": 7, "also_k": [100], "max_bank_images": 300},
    {"name": "few_shot", "shots": [1, 5]},
    LINEAR,
)
BLOCKS = (*EVALUATE[:2], {**LINEAR, "inputs": "blocks"})
DECODER = {"decoder_width": 16, "decoder_depth": 1, "decoder_heads": 2}
# (objective, what it changes in the model)
OBJECTIVES: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "supervised": ({}, {"representation_layer": True}),
    "mae": ({"name": "mae", **DECODER}, {"positions": "sincos2d_mae"}),
    "masked": ({"name": "masked_patch_prediction"}, {}),
    "distillation": ({"name": "distillation"}, {"distillation_token": True}),
}
# Two images of the 360.
TOLERANCE = 2 / 360 + 1e-9


def start(runs: FaultRuns, folder: Path, *command: str | Path, num_ranks: int) -> None:
    script, *words = command
    ranks = runs.starter.start([ROOT / script, *words], num_ranks=num_ranks, folder=folder)
    assert set(wait_all(ranks)) == {0}, ranks[0].output()


def train(runs: FaultRuns, folder: Path, name: str, evaluate: Evaluations, **changes: Any) -> Path:
    """changes: sections that replace the ones here."""
    objective, model = OBJECTIVES[name]
    values = {
        "base": str(ROOT / "configs/digits/pretrain.yaml"),
        "output": str(folder / "run"),
        "data": {"path": str(runs.shards), "global_batch": 16, "num_workers": 0},
        "model": {"width": 24, "depth": 4, "mlp_width": 48, "drop_path": 0.0, **model},
        "objective": dict(objective),
        "optim": {"lr": 0.003},
        "engine": {"device": "cpu", "num_threads": 1},
        "schedule": {"epochs": None, "steps": 6, "warmup_steps": 0},
        "evaluate": list(evaluate),
        "tracking": {"uri": None},
    }
    for section, keys in changes.items():
        values[section] |= keys
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(values))
    start(runs, folder, "pretrain/main.py", "--config", folder / "run.yaml", num_ranks=2)
    return folder / "run"


@pytest.fixture(scope="module")
def teacher(fault_runs: FaultRuns, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(fault_runs, tmp_path_factory.mktemp("teacher"), "supervised", ())


@pytest.mark.parametrize(
    ("name", "stage", "evaluate"),
    [
        ("supervised", 3, BLOCKS),
        ("mae", 0, EVALUATE),
        ("mae", 3, EVALUATE),
        ("masked", 3, EVALUATE),
        ("distillation", 3, BLOCKS),
    ],
)
def test_metrics_in_training_equal_those_outside(
    fault_runs: FaultRuns, teacher: Path, tmp_path: Path, name: str, stage: int, evaluate: Any
) -> None:
    taught = {"teacher": {"weights": str(teacher)}} if name == "distillation" else {}
    engine = {"zero_stage": stage}
    run = train(fault_runs, tmp_path / "a", name, evaluate, objective=taught, engine=engine)
    logged = [each for row in journal_rows(run) for each in row.items() if each[0][:4] == "val/"]
    words = (f"init={run}", f"output={tmp_path / 'results'}", "compute.device=cpu")
    words += ("data.num_workers=0", "tracking.uri=null")
    start(fault_runs, tmp_path, "finetune/evaluate_model.py", *words, num_ranks=1)
    outside = json.loads((tmp_path / "results/results.json").read_text())["results"]
    assert len(outside) == 2 + 4 + 4
    for (ours, value), row in zip(logged, outside, strict=True):
        assert ours == f"val/{row['metric']}"
        assert value == pytest.approx(row["value"], abs=TOLERANCE), ours
