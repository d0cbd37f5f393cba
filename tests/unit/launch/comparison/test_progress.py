"""What runs had spent at each step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.comparison.progress import progress_of
from launch.comparison.runs import ComparedRun
from launch.jobs.attempts import ATTEMPT
from pretrain.run import PretrainRun
from vitscale.config.loader import load_run, run_to_yaml
from vitscale.distributed.failures.events import append_event
from vitscale.models.costs import train_flops_per_image
from vitscale.tracking.journal import Row

HOUR = 3600.0


def run(folder: Path | None, *rows: Row, **params: str) -> ComparedRun:
    params = {key.replace("__", "."): value for key, value in params.items()}
    return ComparedRun(label="", source="", folder=folder, status=None, params=params, rows=rows)


def row(step: int, time: float, **metrics: float) -> Row:
    return Row(step=step, time=time, metrics=metrics)


def test_samples_need_the_batch_and_hours_the_times() -> None:
    rows = (row(10, 5 * HOUR), row(30, 7 * HOUR), row(30, 7.5 * HOUR, x=1.0))
    known = progress_of(run(None, *rows, data__global_batch="16"))
    assert known.steps == (10, 30)
    assert known.samples == (160.0, 480.0)
    assert known.hours == pytest.approx((0.0, 2.5))
    assert known.flops is None
    assert (known.at("samples", 29), known.at("hours", 5)) == (160.0, None)
    assert progress_of(run(None, *rows)).samples is None


def test_waits_between_attempts_are_no_hours(tmp_path: Path) -> None:
    attempts = [(0.5, 2.0), (5.0, 6.0), (6.0, None)]
    common = {"cluster": "slurm", "job_id": "1", "restart": 0, "num_tasks": 1, "first_step": 0}
    events = [
        {"number": i, "started": start * HOUR, **common} | ({"ended": end * HOUR} if end else {})
        for i, (start, end) in enumerate(attempts, start=1)
    ]
    for event in events:
        append_event(tmp_path, ATTEMPT, event)
    rows = (row(1, 1 * HOUR), row(2, 2 * HOUR), row(3, 5.5 * HOUR), row(4, 7 * HOUR))
    assert progress_of(run(tmp_path, *rows)).hours == pytest.approx((0.0, 1.0, 1.5, 3.0))


def test_flops_are_those_of_the_model(tmp_path: Path) -> None:
    overrides = ["data.path=shards", "model.image_size=32", "model.patch_size=4"]
    overrides += ["model.width=64", "model.depth=2", "model.num_heads=2", "model.mlp_width=128"]
    overrides += ["schedule.steps=30", "data.global_batch=8", "name=x", "optim.lr=0.1"]
    loaded = load_run({"pretrain": PretrainRun}, None, overrides=["stage=pretrain", *overrides]).run
    assert isinstance(loaded, PretrainRun)
    (tmp_path / "config.yaml").write_text(run_to_yaml(loaded))
    (tmp_path / "classes.json").write_text(json.dumps(["a", "b"]))
    each = train_flops_per_image(loaded.model.resolved(num_classes=2))
    rows = (row(10, 0.0), row(25, 2.0))
    found = progress_of(run(tmp_path, *rows, data__global_batch="8")).flops
    assert found == pytest.approx((80 * each, 200 * each))
    (tmp_path / "config.yaml").write_text("stage: pretrain\nunknown: 1\n")
    assert progress_of(run(tmp_path, *rows, data__global_batch="8")).flops is None
