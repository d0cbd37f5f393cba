"""Features are extracted once and spread over ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.engine.array_subject import array_subject, split_of
from vitscale.evaluation.features.rows import owners

pytestmark = pytest.mark.usefixtures("group")


def train_split() -> Any:
    values = torch.randn(30, 5, generator=torch.Generator().manual_seed(0))
    return split_of(values, [number % 3 for number in range(30)], name="train")


def test_samples_are_extracted_once_whoever_asks() -> None:
    split = train_split()
    subject = array_subject(split, split)
    some = subject.train_features(samples=np.array([3, 5, 17]))
    assert torch.equal(some.values_ND, split.features[[3, 5, 17]])
    assert some.labels_N.tolist() == [0, 2, 2]
    every = subject.train_features()
    assert torch.equal(every.values_ND, split.features)
    subject.train_features(samples=np.array([0, 29]))
    assert [len(each) for each in subject.extracted] == [3, 27]
    subject.features.forget()
    subject.train_features()
    assert len(subject.extracted[-1]) == 30


def test_parts_of_a_training_set_are_numbered_through() -> None:
    split, other = train_split(), split_of(torch.ones(4, 5), [2, 1, 0, 2], name="other")
    subject = array_subject((split, other), other)
    found = subject.train_features(samples=np.array([29, 30, 32]))
    assert found.samples.tolist() == [29, 30, 32]
    assert found.labels_N.tolist() == [2, 2, 0]
    assert torch.equal(found.values_ND[1:], torch.ones(2, 5))


def test_any_choice_of_samples_is_spread_over_ranks() -> None:
    for step in (1, 2, 7):
        counts = np.bincount(owners(np.arange(0, 6000 * step, step), world_size=4))
        assert len(counts) == 4 and counts.min() > 1350
