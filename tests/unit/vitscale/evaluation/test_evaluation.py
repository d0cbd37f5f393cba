"""Intervals of shares, models that do not suit the shards, and features that are computed once."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

from tests.support.engine.subjects import array_subject, split_of
from vitscale.config.errors import UserError
from vitscale.evaluation.evaluation import Share, check_labels


@pytest.mark.parametrize(
    ("count", "images"), [(0, 1), (1, 1), (0, 360), (346, 360), (360, 360), (42_500, 50_000)]
)
def test_the_interval_equals_scipys(count: int, images: int) -> None:
    expected = binomtest(count, images).proportion_ci(method="wilson")
    found = Share(count, images).interval()
    assert found == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_a_share_is_a_number_that_knows_its_images() -> None:
    share = Share(3, 4)
    assert share == 0.75 and share.images == 4 and math.isnan(Share(0, 0))
    assert all(map(math.isnan, Share(0, 0).interval()))


def subject(
    *shards: str, outputs: int = 3, model: tuple[str, ...] | None = ("cat", "dog", "eel")
) -> Any:
    val = SimpleNamespace(classes=shards, folder="shards")
    return SimpleNamespace(val=val, num_outputs=outputs, classes=model)


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (subject(), ("needs labels", "labelled shards")),
        (subject("cat", outputs=0), ("has no head", "knn")),
        (subject("cat", "dog"), ("2 classes", "head has 3", "subset")),
        (subject("cat", "eel", "dog"), ("in another order", "label 1 is 'eel'", "'dog'")),
        (subject("cat", "dog", "fox"), ("other classes", "label 2 is 'fox'", "subset")),
    ],
)
def test_other_classes_are_refused(given: Any, parts: tuple[str, ...]) -> None:
    for model in (("cat", "dog", "eel"), None):
        check_labels(subject("cat", "dog", "eel", model=model), name="classification")
    with pytest.raises(UserError) as error:
        check_labels(given, name="classification")
    assert all(part in str(error.value) for part in parts)


# ---- features -----------------------------------------------------------------------------------


def train_split() -> Any:
    values = torch.randn(30, 5, generator=torch.Generator().manual_seed(0))
    return split_of(values, [number % 3 for number in range(30)])


def test_features_are_computed_once_whoever_asks() -> None:
    split = train_split()
    subject = array_subject(split, split)
    some = subject.features("train", samples=np.array([3, 5, 17]))
    assert torch.equal(some.values_ND, split.values[[3, 5, 17]])
    assert some.labels_N.tolist() == [0, 2, 2]
    every = subject.features("train")
    assert sorted(every.samples) == list(range(30))
    assert torch.equal(every.values_ND, split.values[torch.from_numpy(every.samples)])
    again = subject.features("train", samples=np.array([0, 29]))
    assert sorted(again.samples) == [0, 29]
    assert [len(each) for each in subject.extracted] == [3, 27]
    subject.kept.clear()
    subject.features("train")
    assert len(subject.extracted[-1]) == 30


def test_parts_of_a_training_set_are_numbered_through() -> None:
    split, other = train_split(), split_of(torch.ones(4, 5), [2, 1, 0, 2])
    subject = array_subject((split, other), other)
    found = subject.features("train", samples=np.array([29, 30, 32]))
    assert found.samples.tolist() == [29, 30, 32]
    assert found.labels_N.tolist() == [2, 2, 0]
    assert torch.equal(found.values_ND[1:], torch.ones(2, 5))
