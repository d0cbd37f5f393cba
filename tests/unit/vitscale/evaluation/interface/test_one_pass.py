"""Evaluations that read the same output share one pass over the images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.engine.given_outputs import given_outputs
from vitscale.config.errors import UserError
from vitscale.distributed.world import World
from vitscale.evaluation.interface.evaluation import Outputs
from vitscale.evaluation.interface.one_pass import results
from vitscale.evaluation.logits.calibration import Calibration, CalibrationSettings
from vitscale.evaluation.logits.classification import Classification, ClassificationSettings
from vitscale.evaluation.throughput import Throughput, ThroughputSettings


def test_logits_are_computed_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = given_outputs(world, torch.eye(3), [0, 1, 1])
    passes = []

    def outputs(*arguments: Any) -> Iterator[Outputs]:
        passes.append(arguments[2])
        return real(*arguments)

    real = type(subject).outputs
    monkeypatch.setattr(type(subject), "outputs", outputs)
    model: Any = SimpleNamespace(world=world, logits=lambda images: images)
    object.__setattr__(subject, "model", model)
    evaluations = [
        Classification(ClassificationSettings()),
        Throughput(ThroughputSettings(num_batches=1, warmup_batches=0)),
        Calibration(CalibrationSettings()),
    ]
    found = list(results(evaluations, subject))
    alone = [evaluations[0].metrics(subject), evaluations[2].metrics(subject)]
    assert passes == ["logits"] * 3
    assert [found[0], found[2]] == alone and list(found[1]) == ["images_per_s"]


def test_throughput_runs_warm_up_and_timed_batches(world: World) -> None:
    shapes: list[tuple[int, ...]] = []
    subject = given_outputs(world, torch.eye(3), [0])
    model: Any = SimpleNamespace(world=world, logits=lambda images: shapes.append(images.shape))
    object.__setattr__(subject, "model", model)
    settings = ThroughputSettings(num_batches=4, warmup_batches=2)
    assert Throughput(settings).metrics(subject)["images_per_s"] > 0
    assert shapes == [(3, 3, 8, 8)] * 6


def test_a_file_that_cannot_be_written_is_one_error(world: World, tmp_path: Path) -> None:
    (tmp_path / "files").write_text("no folder")
    subject = given_outputs(world, torch.eye(3), [0, 1, 2], folder=tmp_path / "files")
    with pytest.raises(UserError, match="calibration.csv: cannot be written"):
        Calibration(CalibrationSettings()).metrics(subject)
