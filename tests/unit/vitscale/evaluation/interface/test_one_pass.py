"""Evaluations that read the same output share one pass over the images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
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


def test_logits_are_computed_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = given_outputs(world, torch.eye(3), [0, 1, 1])
    passes = []

    def outputs(*arguments: Any) -> Iterator[Outputs]:
        passes.append(arguments[2])
        return real(*arguments)

    real = type(subject).outputs
    monkeypatch.setattr(type(subject), "outputs", outputs)
    evaluations = [Classification(ClassificationSettings()), Calibration(CalibrationSettings())]
    found = list(results(evaluations, subject))
    assert found == [each.metrics(subject) for each in evaluations]
    assert passes == ["logits"] * 3


def test_a_file_that_cannot_be_written_is_one_error(world: World, tmp_path: Path) -> None:
    (tmp_path / "files").write_text("no folder")
    subject = given_outputs(world, torch.eye(3), [0, 1, 2], folder=tmp_path / "files")
    with pytest.raises(UserError, match="calibration.csv: cannot be written"):
        Calibration(CalibrationSettings()).metrics(subject)
