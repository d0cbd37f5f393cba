"""Evaluations of features: equal in training and outside, on any ranks, and after a kill."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.ranks.fault_runs import FaultRuns, fault, wait_all
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
        self,
        script: str,
        values: Mapping[str, Any],
        folder: Path,
        *,
        num_ranks: int,
        faults: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.yaml").write_text(yaml.safe_dump(dict(values)))
        command = [ROOT / "tests/support/ranks/patched_rank.py", ROOT / script]
        ranks = self.runs.starter.start(
            [*command, "--config", folder / "run.yaml"],
            num_ranks=num_ranks,
            folder=folder,
            environment={"VITSCALE_FAULTS": json.dumps(list(faults)), "VITSCALE_MUTANT": ""},
        )
        codes = wait_all(ranks)
        assert set(codes) in ({0}, {-9}), ranks[0].output()
        return codes

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
        self,
        folder: Path,
        init: Path,
        evaluate: Sequence[Mapping[str, Any]],
        *,
        num_ranks: int = 1,
        cache: Path | None = None,
        faults: Sequence[Mapping[str, Any]] = (),
    ) -> list[tuple[str, float]] | None:
        """Metrics in the order of the table; None if a fault killed it."""
        values = {
            "stage": "evaluate",
            "name": "features",
            "init": str(init),
            "output": str(folder / "results"),
            "data": {"path": str(self.runs.shards), "num_workers": 0},
            "compute": {"device": "cpu", "num_threads": 1},
            "evaluate": list(evaluate),
            "features": {"cache": str(cache) if cache else None, "images_per_file": 64},
            "tracking": {"uri": None},
        }
        script = "finetune/evaluate_model.py"
        codes = self._start(script, values, folder, num_ranks=num_ranks, faults=faults)
        if set(codes) != {0}:
            return None
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
    assert outside is not None and len(outside) == 2 + 4 + 4
    for (ours, value), (theirs, expected) in zip(logged, outside, strict=True):
        assert ours == f"val/{theirs}"
        assert value == pytest.approx(expected, abs=TOLERANCE), ours


def test_a_killed_evaluation_resumes_from_its_cache(
    evaluations: Evaluations, trained: Path, tmp_path: Path
) -> None:
    expected = evaluations.evaluate(tmp_path / "expected", trained, EVALUATE, num_ranks=2)
    cache = tmp_path / "cache"
    killed = evaluations.evaluate(
        tmp_path / "killed",
        trained,
        [LINEAR],
        cache=cache,
        faults=[fault("feature file", 5, "kill")],
    )
    assert killed is None
    kept = {path: path.stat().st_mtime_ns for path in cache.rglob("*.safetensors")}
    assert len(kept) == 4
    damaged = sorted(kept)[1]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    found = evaluations.evaluate(tmp_path / "again", trained, EVALUATE, num_ranks=2, cache=cache)
    assert found is not None and expected is not None
    assert dict(found) == pytest.approx(dict(expected))
    intact = {path for path, time in kept.items() if path.stat().st_mtime_ns == time}
    assert intact == kept.keys() - {damaged}
    # 1,437 training and 360 test images, the latter before and after the representation layer.
    assert len(list(cache.rglob("*.safetensors"))) > 23 + 6
    shutil.rmtree(tmp_path / "again/results")
    last = evaluations.evaluate(
        tmp_path / "again",
        trained,
        EVALUATE,
        cache=cache,
        faults=[fault("feature file", 1, "kill")],
    )
    assert last is not None  # nothing was left to write
