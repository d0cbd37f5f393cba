"""The confusion matrix of a few images, and which of them are drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from tests.support.corpora.shard_folders import write_shard_folder
from tests.support.engine.subjects import given_outputs
from vitscale.data.index import read_split
from vitscale.evaluation.confusion import (
    Confusion,
    ConfusionSettings,
    examples,
)


def test_examples_show_each_wrong_class_before_a_second() -> None:
    guesses = (2, 1, 2, 1, 2, 0, 0)
    found = np.array([(n == 6, guess, 10 + n) for n, guess in enumerate(guesses)], np.int64)
    assert examples(found, 0, count=4) == [(2, 10), (1, 11), (2, 12), (1, 13)]
    assert len(examples(found, 0, count=9)) == 5


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
