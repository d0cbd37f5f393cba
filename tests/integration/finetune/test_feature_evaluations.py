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
EVALUATE: Sequence[Mapping[str, Any]] = (
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
    "masked": ({"name": "masked_patch_prediction", "target": "color_grid"}, {}),
    "distillation": ({"name": "distillation"}, {"distillation_token": True}),
}
# Two images of the 360.
TOLERANCE = 2 / 360 + 1e-9


class Evaluations:
    """Starts trainings and evaluations of tiny models on the digits."""

    def __init__(self, runs: FaultRuns) -> None:
        self.runs = runs

    def _start(
        self, script: str, values: Mapping[str, Any], folder: Path, *, num_ranks: int
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.yaml").write_text(yaml.safe_dump(dict(values)))
        command = [ROOT / script, "--config", folder / "run.yaml"]
        ranks = self.runs.starter.start(command, num_ranks=num_ranks, folder=folder)
        assert set(wait_all(ranks)) == {0}, ranks[0].output()

    def train(
        self,
        folder: Path,
        name: str,
        evaluate: Sequence[Mapping[str, Any]],
        *,
        stage: int,
        teacher: Path | None = None,
    ) -> Path:
        objective, model = OBJECTIVES[name]
        if teacher is not None:
            objective = {**objective, "teacher": {"weights": str(teacher)}}
        size = {"width": 24, "depth": 4, "mlp_width": 48, "drop_path": 0.0}
        values = {
            "base": str(ROOT / "configs/digits/pretrain.yaml"),
            "output": str(folder / "run"),
            "data": {"path": str(self.runs.shards), "global_batch": 16, "num_workers": 0},
            "model": {**size, **model},
            "objective": dict(objective),
            "optim": {"lr": 0.003},
            "engine": {"device": "cpu", "num_threads": 1, "zero_stage": stage},
            "schedule": {"epochs": None, "steps": 6, "warmup_steps": 0},
            "evaluate": list(evaluate),
            "tracking": {"uri": None},
        }
        self._start("pretrain/main.py", values, folder, num_ranks=2)
        return folder / "run"

    def evaluate(
        self, folder: Path, init: Path, evaluate: Sequence[Mapping[str, Any]]
    ) -> list[tuple[str, float]]:
        """Metrics in the order of the table."""
        values = {
            "stage": "evaluate",
            "name": "features",
            "init": str(init),
            "output": str(folder / "results"),
            "data": {"path": str(self.runs.shards), "num_workers": 0},
            "compute": {"device": "cpu", "num_threads": 1},
            "evaluate": list(evaluate),
            "tracking": {"uri": None},
        }
        self._start("finetune/evaluate_model.py", values, folder, num_ranks=1)
        rows = json.loads((folder / "results/results.json").read_text())["results"]
        return [(row["metric"], row["value"]) for row in rows]


@pytest.fixture(scope="module")
def evaluations(fault_runs: FaultRuns) -> Evaluations:
    return Evaluations(fault_runs)


@pytest.fixture(scope="module")
def trained(evaluations: Evaluations, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    return evaluations.train(folder, "supervised", (), stage=0)


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
    evaluations: Evaluations,
    trained: Path,
    tmp_path: Path,
    name: str,
    stage: int,
    evaluate: Sequence[Mapping[str, Any]],
) -> None:
    teacher = trained if name == "distillation" else None
    run = evaluations.train(tmp_path / "train", name, evaluate, stage=stage, teacher=teacher)
    logged = [
        metric
        for row in journal_rows(run)
        for metric in row.items()
        if metric[0].startswith("val/")
    ]
    outside = evaluations.evaluate(tmp_path / "outside", run, evaluate)
    assert len(outside) == 2 + 4 + 4
    for (ours, value), (theirs, expected) in zip(logged, outside, strict=True):
        assert ours == f"val/{theirs}"
        assert value == pytest.approx(expected, abs=TOLERANCE), ours
