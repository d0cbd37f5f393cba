"""Classes are mapped by name, and only those of the shards compete; ReaL has sets of labels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.support.engine.subjects import given_outputs, index_of
from vitscale.config.errors import UserError
from vitscale.data.index import INDEX_NAME, SplitIndex
from vitscale.data.label_spaces import SUBSETS, known_space, timm_file
from vitscale.evaluation.evaluation import Share
from vitscale.evaluation.real_labels import RealLabels, RealLabelsSettings, _label_table
from vitscale.evaluation.subset import Subset, SubsetSettings

IMAGENET = known_space("imagenet_1k")


def subset(**settings: Any) -> Subset:
    return Subset(SubsetSettings(**settings))


def test_labels_are_mapped_by_name() -> None:
    # The model's best output, fox, is no class of the shards.
    logits = torch.tensor([[1.0, 2, 3, 9], [3, 2, 1, 9], [1, 3, 2, 9], [1, 2, 3, 9]])
    names = {"classes": ("eel", "cat"), "model_classes": ("cat", "dog", "eel", "fox")}
    subject = given_outputs(logits, [0, 1, 1, 1], **names)
    subset().check(subject)
    assert subset().metrics(subject) == {"subset_top1": 0.5}


@pytest.mark.parametrize("name", SUBSETS)
def test_named_sets_are_timms_index_lists(name: Any) -> None:
    lines = timm_file(f"{name}_indices.txt", where="").read_text().split()
    classes = known_space(name)[::-1]  # shards may have any order
    subject = given_outputs(torch.zeros(1, 1000), [0], classes=classes)
    columns, labels = subset(classes=name)._columns(subject)
    assert columns == [int(line) for line in lines] and labels == list(range(200))[::-1]


def test_classes_that_the_shards_lack_compete_too() -> None:
    first, second = known_space("imagenet_a")[:2]
    logits = torch.zeros(1, 1000)
    logits[0, IMAGENET.index(first)], logits[0, IMAGENET.index(second)] = 1.0, 2.0
    logits[0, 0] = 3.0  # not in ImageNet-A
    subject = given_outputs(logits, [0], classes=(first,))
    found = [
        subset(classes=name).metrics(subject)["subset_top1"] for name in ("shards", "imagenet_a")
    ]
    assert found == [1.0, 0.0]


def test_folders_of_v2_are_positions() -> None:
    classes = sorted(map(str, range(1000)))  # as text: 0, 1, 10, 100, ...
    logits = torch.zeros(2, 1000)
    logits[0, 10] = logits[1, 2] = 1.0
    subject = given_outputs(logits, [2, 2], classes=classes)
    found = subset().metrics(subject)
    assert found == {"subset_top1": 0.5, "subset_top5": 0.5}


def test_images_of_missing_classes_count_as_wrong() -> None:
    names = known_space("imagenet_21k_goog")
    classes = (*IMAGENET[:2], "n04399382")  # ImageNet-21k has no teddy bear
    logits = torch.zeros(2, len(names))
    logits[0, names.index(IMAGENET[1])] = 1.0
    subject = given_outputs(logits, [1, 2], classes=classes)
    with pytest.raises(UserError, match="1 of 3 classes.*n04399382"):
        subset().check(subject)
    assert subset(allow_missing=True).metrics(subject) == {"subset_top1": 0.5}


# ---- ImageNet-ReaL ------------------------------------------------------------------------------

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
