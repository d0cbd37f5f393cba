"""Classes are mapped by name, and only those of the shards compete."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.engine.subjects import given_outputs
from vitscale.config.errors import UserError
from vitscale.data.label_spaces import SUBSETS, known_space, timm_file
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
