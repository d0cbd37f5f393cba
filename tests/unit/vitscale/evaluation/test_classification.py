"""Accuracy, calibration and confusion equal cases by hand; padding is not counted."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.corpora.shard_folders import write_shard_folder
from tests.support.engine.subjects import WORLD, given_outputs
from vitscale.config.errors import UserError
from vitscale.data.index import read_split
from vitscale.evaluation.classification import Classification, ClassificationSettings
from vitscale.evaluation.confusion import Confusion, ConfusionSettings, examples
from vitscale.evaluation.evaluation import Outputs, Share

NUM = 10
TABLE = """\
label,class,images,correct,top1
0,"cat, black",3,3,1.000000
1,dog,1,0,0.000000
2,eel,0,0,
"""


@pytest.mark.parametrize("num_classes", [5, 8])
def test_metrics_equal_brute_force(num_classes: int) -> None:
    logits = torch.randn(NUM, num_classes, generator=torch.Generator().manual_seed(1))
    labels = [(3 * number) % num_classes for number in range(NUM)]
    found = Classification(ClassificationSettings()).metrics(given_outputs(logits, labels))
    at1 = at5 = loss = 0.0
    for row, label in zip(logits.tolist(), labels, strict=True):
        better = sum(value > row[label] for value in row)
        at1, at5 = at1 + (better < 1), at5 + (better < 5)
        loss += math.log(sum(map(math.exp, row))) - row[label]
    expected = {"top1": at1 / NUM, "loss": loss / NUM}
    if num_classes > 5:
        expected["top5"] = at5 / NUM
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    assert ("top5" in found) == (num_classes > 5)
    assert isinstance(found["top1"], Share) and found["top1"].images == NUM


def test_each_head_of_a_distilled_model_is_counted() -> None:
    """The class head is right about image 0, the other about 0 and 1, their sum about 0 and 2."""
    heads_2BC = torch.tensor(
        [
            [[2.0, 0, 0], [9, 0, 0], [0, 3.0, 2.9], [1, 0, 0]],
            [[2.0, 0, 0], [0, 1, 0], [1.0, 0.0, 0.9], [1, 0, 0]],
        ]
    )
    model: Any = SimpleNamespace(world=WORLD, known_outputs=("logits", "heads"))
    evaluation = Classification(ClassificationSettings())
    evaluation.start(replace(given_outputs(torch.zeros(4, 3), [0, 1, 2, 0]), model=model))
    labels_B, weights_B = torch.tensor([0, 1, 2, 0]), torch.tensor([1.0, 1, 1, 0])  # one is padding
    evaluation.add(Outputs(heads_2BC.mean(dim=0), labels_B, weights_B, np.arange(4), heads_2BC))
    found = evaluation.finish()
    shares = {"cls_top1": 1 / 3, "dist_top1": 2 / 3, "softmax_top1": 2 / 3}
    assert {name: found[name] for name in shares} == pytest.approx(shares)


def test_the_mean_over_classes_counts_classes(tmp_path: Path) -> None:
    logits = torch.eye(3)[[0, 0, 0, 2]]
    classes = ("cat, black", "dog", "eel")
    subject = given_outputs(logits, [0, 0, 0, 1], classes=classes, folder=tmp_path)
    found = Classification(ClassificationSettings()).metrics(subject)
    assert (found["top1"], found["class_mean_top1"]) == (0.75, 0.5)
    assert (tmp_path / "per_class.csv").read_text() == TABLE


def test_calibration_equals_a_case_by_hand(tmp_path: Path) -> None:
    """Two classes, the first predicted with these probabilities."""
    logits = torch.tensor([[math.log(p), math.log1p(-p)] for p in (0.95, 0.95, 0.65, 0.65)])
    subject = given_outputs(logits, [0, 0, 0, 1], folder=tmp_path / "files")
    found = Classification(ClassificationSettings()).metrics(subject)
    # Half of the images are 0.05 too unsure, the other half 0.15 too sure.
    loss = -(2 * math.log(0.95) + math.log(0.65) + math.log(0.35)) / 4
    assert (found["ece"], found["loss"]) == pytest.approx((0.1, loss), rel=1e-6)
    with open(tmp_path / "files/calibration.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["images"] != "0"]
    assert [(row["images"], row["confidence"], row["accuracy"]) for row in rows] == [
        ("2", "0.650000", "0.500000"),
        ("2", "0.950000", "1.000000"),
    ]
    assert [float(row["low"]) for row in rows] == pytest.approx([9 / 15, 14 / 15], abs=1e-6)


def test_certain_predictions_are_in_the_last_bin() -> None:
    logits = torch.tensor([[200.0, 0.0], [200.0, 0.0]])
    found = Classification(ClassificationSettings()).metrics(given_outputs(logits, [0, 1]))
    assert (found["ece"], found["loss"]) == pytest.approx((0.5, 100.0))


def test_a_file_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "files").write_text("no folder")
    subject = given_outputs(torch.eye(2), [0, 1], folder=tmp_path / "files")
    with pytest.raises(UserError, match="per_class.csv: cannot be written"):
        Classification(ClassificationSettings()).metrics(subject)


# ---- confusion -----------------------------------------------------------------------------------


def test_examples_show_each_wrong_class_once() -> None:
    guesses = (2, 1, 2, 1, 2, 0, 0)
    found = np.array([(n == 6, guess, 10 + n) for n, guess in enumerate(guesses)], np.int64)
    assert examples(found, 0, count=4) == [(2, 10), (1, 11)]
    assert examples(found, 0, count=1) == [(2, 10)]


def test_files_and_metric_equal_a_case_by_hand(tmp_path: Path) -> None:
    folder = write_shard_folder(
        tmp_path / "shards", num_per_class=2, num_shards=1, classes=("$a_", "b"), split="val"
    )
    val = read_split(str(folder), split="val")
    logits = torch.eye(2)[[1, 1, 0, 1]]  # of labels 0, 1, 0, 1
    subject = given_outputs(logits, [], val=val, folder=tmp_path / "files")
    found = Confusion(ConfusionSettings(num_classes=1)).metrics(subject)
    assert found == {"worst_classes_top1": 0.5}
    lines = (tmp_path / "files/confusion.csv").read_text().splitlines()
    assert lines == ["class,predicted,images", "$a_,b,1", "b,b,2", "$a_,$a_,1"]
    with Image.open(tmp_path / "files/worst_classes.png") as picture:
        assert np.array(picture.convert("L")).std() > 5
