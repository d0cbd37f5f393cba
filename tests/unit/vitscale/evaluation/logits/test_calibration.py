"""Calibration of cases computed by hand."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
import torch

from tests.support.engine.given_outputs import given_outputs
from vitscale.config.errors import UserError
from vitscale.distributed.world import World
from vitscale.evaluation.logits.calibration import Calibration, CalibrationSettings


def logits_of(*confidences: float) -> torch.Tensor:
    """Rows of two classes, the first predicted with these probabilities."""
    return torch.tensor([[math.log(each), math.log1p(-each)] for each in confidences])


def test_metrics_equal_a_case_by_hand(world: World, tmp_path: Path) -> None:
    logits, labels = logits_of(0.95, 0.95, 0.65, 0.65), [0, 0, 0, 1]
    subject = given_outputs(world, logits, labels, folder=tmp_path / "files")
    found = Calibration(CalibrationSettings()).metrics(subject)
    # Half of the images are 0.05 too unsure, the other half 0.15 too sure.
    nll = -(2 * math.log(0.95) + math.log(0.65) + math.log(0.35)) / 4
    assert found == pytest.approx({"ece": 0.1, "nll": nll}, rel=1e-6)
    with open(tmp_path / "files/calibration.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["images"] != "0"]
    assert [(row["images"], row["accuracy"]) for row in rows] == [
        ("2", "0.500000"),
        ("2", "1.000000"),
    ]
    assert [float(row["low"]) for row in rows] == pytest.approx([9 / 15, 14 / 15], abs=1e-6)


def test_certain_predictions_are_in_the_last_bin(world: World) -> None:
    logits = torch.tensor([[200.0, 0.0], [200.0, 0.0]])
    found = Calibration(CalibrationSettings()).metrics(given_outputs(world, logits, [0, 1]))
    assert found == pytest.approx({"ece": 0.5, "nll": 100.0})


def test_a_file_that_cannot_be_written_is_one_error(world: World, tmp_path: Path) -> None:
    (tmp_path / "files").write_text("no folder")
    subject = given_outputs(world, torch.eye(2), [0, 1], folder=tmp_path / "files")
    with pytest.raises(UserError, match="calibration.csv: cannot be written"):
        Calibration(CalibrationSettings()).metrics(subject)
