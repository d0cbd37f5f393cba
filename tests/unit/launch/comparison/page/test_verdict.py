"""Which run is best, and why."""

from __future__ import annotations

import math
from typing import Any

import pytest

from launch.comparison.differences import compare
from launch.comparison.page.verdict import verdict
from launch.comparison.progress import progress_of
from launch.comparison.runs import ComparedRun
from vitscale.tracking.journal import Row


def run(label: str, metrics: dict[str, float], *, steps: int = 10, **params: str) -> ComparedRun:
    rows = (Row(step=steps, time=1.0, metrics=metrics),)
    params = {key.replace("__", "."): value for key, value in params.items()}
    return ComparedRun(label=label, source="", folder=None, status=None, params=params, rows=rows)


def found(*runs: ComparedRun) -> dict[str, Any]:
    compared = compare(runs)
    result = verdict(compared.metrics, compared, [progress_of(each) for each in runs])
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


def test_groups_of_seeds_are_ranked_by_their_means() -> None:
    def seeded(value: float, seed: int, rate: str) -> ComparedRun:
        return run(f"{rate}-{seed}", {"val/top1": value}, seed=str(seed), optim__lr=rate)

    low = [seeded(value, seed, "1") for seed, value in enumerate((0.2, 0.9))]
    high = [seeded(value, seed, "2") for seed, value in enumerate((0.6, 0.7))]
    best = found(*low, *high)
    assert [(side["label"], side["seeds"]) for side in best["sides"]] == [
        ("2-0 and 1 more", 2),
        ("1-0 and 1 more", 2),
    ]
    assert [side["value"] for side in best["sides"]] == pytest.approx([0.65, 0.55])
    assert best["against_second"] == ["optim.lr"]
    assert best["seed_deviation"] == pytest.approx(0.7 / 2**0.5)
    assert best["ranked"] == [1, 3, 2, 0]
    alone = found(*low)
    assert [side["label"] for side in alone["sides"]] == ["1-1", "1-0"]
    assert alone["against_second"] == ["seed"]
