"""ImageNet-ReaL: sets of labels by the original name of an image."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.support.engine.subjects import given_outputs, index_of
from vitscale.config.errors import UserError
from vitscale.data.index import INDEX_NAME, SplitIndex
from vitscale.data.label_spaces import known_space
from vitscale.evaluation.evaluation import Share
from vitscale.evaluation.real_labels import RealLabels, RealLabelsSettings, _label_table

REAL = RealLabels(RealLabelsSettings())
# Labels of the first images: none; 970, 795; 230, 231; 809.
NUMBERS = (3, 1, 2, 4)


def split_with_keys(folder: Path, keys: list[str]) -> SplitIndex:
    path = folder / INDEX_NAME
    pq.write_table(pa.table({"key": keys, "split": ["val"] * len(keys)}), path)
    split = index_of([0] * len(keys), known_space("imagenet_1k"), folder=folder)
    return replace(split, index_path=path)


def test_accuracy_equals_a_case_by_hand(tmp_path: Path) -> None:
    keys = [f"val-n01440764-ILSVRC2012_val_{number:08d}" for number in NUMBERS]
    logits = torch.zeros(4, 1000)
    logits[0, 231] = logits[1, 5] = logits[2, 1] = logits[3, 1] = 9.0
    logits[2, [2, 3, 4, 795]] = 8.0
    logits[3, [2, 3, 4, 5, 809]] = torch.tensor([8.0, 8.0, 8.0, 8.0, 7.0])
    subject = given_outputs(logits, [], val=split_with_keys(tmp_path, keys))
    REAL.check(subject)
    found = REAL.metrics(subject)
    assert found == pytest.approx({"real_top1": 1 / 3, "real_top5": 2 / 3})
    assert isinstance(found["real_top1"], Share) and found["real_top1"].images == 3


def test_the_published_number_of_images_is_left_out() -> None:
    empty = (_label_table() < 0).all(axis=1)
    assert (len(empty), empty.sum()) == (50_000, 3_163)


@pytest.mark.parametrize("key", ["val-cat-1", "ILSVRC2012_val_00050001", "ILSVRC2012_val_00000000"])
def test_other_keys_are_refused(tmp_path: Path, key: str) -> None:
    keys = ["ILSVRC2012_val_00000001", key]
    subject = given_outputs(torch.zeros(2, 1000), [], val=split_with_keys(tmp_path, keys))
    with pytest.raises(UserError, match=f"(?s){key}.*original names"):
        REAL.check(subject)
