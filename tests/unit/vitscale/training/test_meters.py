"""Means of a log interval, and tracing of steps."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vitscale.training import meters
from vitscale.training.meters import PROFILE_SKIPPED, IntervalMeans, IntervalMeter, profiled

CPU = torch.device("cpu")


def test_a_missing_trace_is_reported(tmp_path: Path) -> None:
    said: list[str] = []
    with profiled(tmp_path / "run/profile.json", steps=2, say=said.append) as step:
        for _ in range(PROFILE_SKIPPED + 1):
            step()
    assert said == ["no complete trace of 2 steps after the first 5: the run made 6 steps"]


def test_no_trace_without_steps_or_path(tmp_path: Path) -> None:
    said: list[str] = []
    with profiled(tmp_path / "profile.json", steps=0, say=said.append) as step:
        step()
    assert said == [] and list(tmp_path.iterdir()) == []


def test_interval_means_are_over_ranks_and_finite_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.0, 4.0, 4.0, 5.0, 5.0])
    monkeypatch.setattr(meters, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    monkeypatch.setattr(meters, "sum_over_ranks", lambda own: 2 * own)  # two equal ranks
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    meter = IntervalMeter(CPU)
    for loss in (1.0, math.nan, 3.0):
        meter.add_loss(torch.tensor(loss))
    meter.add_images(6)
    meter.add_wait(1.0)
    assert meter.read() == {
        "train/loss": 2.0,
        "vitals/images_per_s": 3.0,
        "vitals/data_wait": 0.25,
    }
    again = meter.read()
    assert math.isnan(again.pop("train/loss")) and set(again.values()) == {0.0}


def test_the_first_step_does_not_count_for_throughput(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the interval has no other."""
    seconds = iter([0.0, 90.0, 92.0, 92.0, 93.0, 95.0, 95.0])
    monkeypatch.setattr(meters, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    monkeypatch.setattr(meters, "sum_over_ranks", lambda own: own)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    meter = IntervalMeter(CPU)
    read = []
    for after_warm_up in (6, 0):
        meter.add_images(6)
        meter.add_wait(0.5)
        meter.end_warm_up()
        if after_warm_up:
            meter.add_images(after_warm_up)
            meter.add_wait(0.5)
        read.append(meter.read())
    assert [values["vitals/images_per_s"] for values in read] == [3.0, 2.0]
    assert [values["vitals/data_wait"] for values in read] == [0.25, 0.5 / 3]


def test_means_by_name_are_over_ranks_and_finite_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meters, "sum_over_ranks", lambda own: 2 * own)  # two equal ranks
    means = IntervalMeans(("a", "b"), CPU)
    for value in (1.0, math.nan, 3.0):
        means.add("a", torch.tensor(value))
    means.add("b", torch.tensor(5.0))
    assert means.read() == {"a": 2.0, "b": 5.0}
    assert all(math.isnan(mean) for mean in means.read().values())
