"""Which run is best, and why."""

from __future__ import annotations

import math
from typing import Any

from launch.comparison.differences import compare
from launch.comparison.page.verdict import verdict
from launch.comparison.progress import progress_of
from launch.comparison.runs import RunRecord
from vitscale.tracking.journal import Row


def run(label: str, metrics: dict[str, float], *, steps: int = 10, **params: str) -> RunRecord:
    rows = (Row(step=steps, time=1.0, metrics=metrics),)
    params = {key.replace("__", "."): value for key, value in params.items()}
    return RunRecord(label=label, source="", folder=None, status=None, params=params, rows=rows)


def found(*runs: RunRecord) -> dict[str, Any]:
    result = verdict(compare(runs).metrics, runs, [progress_of(each) for each in runs])
    assert result is not None
    return result


def test_runs_are_ranked_by_accuracy_before_loss() -> None:
    best = found(
        run("a", {"val/loss": 0.1, "val/top1": 0.5, "train/loss": 3.0}),
        run("b", {"val/loss": 0.3, "val/top1": 0.75, "train/loss": 1.0}),
        run("c", {"val/loss": 0.2, "val/top1": math.nan, "train/loss": 2.0}),
        run("d", {"val/loss": 0.2, "val/top1": 0.6, "train/loss": 2.0}),
    )
    assert best["metric"] == "val/loss"  # all four have it
    assert best["ranked"] == [0, 2, 3, 1]
    best = found(run("a", {"val/top1": 0.5, "val/loss": 0.1}), run("b", {"val/top1": 0.7}))
    assert (best["metric"], best["ranked"]) == ("val/top1", [1, 0])
    assert best["headline"] == ["val/top1", "val/loss"]


def test_training_loss_decides_without_evaluations() -> None:
    best = found(run("a", {"train/loss": 2.0}), run("b", {"train/loss": 1.5, "other/mfu": 0.5}))
    assert (best["metric"], best["ranked"]) == ("train/loss", [1, 0])
    only = run("a", {"train/lr": 0.5})
    assert verdict(compare([only]).metrics, [only], [progress_of(only)]) is None


def test_reasons_are_what_differs_from_the_second() -> None:
    common = {"model__width": "8", "tracking__uri": "x"}
    best = found(
        run("a", {"val/top1": 0.9}, name="a", optim__lr="1", data__crop="x", **common),
        run("b", {"val/top1": 0.8}, name="b", optim__lr="2", data__crop="x", **common),
        run("c", {"val/top1": 0.1}, name="c", optim__lr="2", data__crop="y", model__width="9"),
    )
    assert best["against_second"] == ["optim.lr"]
    assert best["reasons"] == ["optim.lr", "model.width", "data.crop"]


def test_runs_of_unequal_length_are_reported() -> None:
    equal = found(run("a", {"val/top1": 0.9}), run("b", {"val/top1": 0.8}))
    assert equal["unequal_budget"] is None
    short = found(run("a", {"val/top1": 0.9}), run("b", {"val/top1": 0.8}, steps=5))
    assert short["unequal_budget"] == "steps"
    samples = found(
        run("a", {"val/top1": 0.9}, steps=10, data__global_batch="8"),
        run("b", {"val/top1": 0.8}, steps=20, data__global_batch="4"),
    )
    assert samples["unequal_budget"] is None
