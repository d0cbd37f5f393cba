"""When evaluations run, intervals of shares, models that do not suit, features computed once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

from tests.support.engine.subjects import array_subject, given_outputs, split_of
from vitscale.config.errors import UserError
from vitscale.evaluation import registry, schedule
from vitscale.evaluation.evaluation import (
    Evaluation,
    EvaluationSettingsBase,
    Output,
    Share,
    Subject,
    check_labels,
)
from vitscale.evaluation.schedule import ScheduledEvaluations


@pytest.mark.parametrize(
    ("count", "images"), [(0, 1), (1, 1), (0, 360), (346, 360), (360, 360), (42_500, 50_000)]
)
def test_the_interval_equals_scipys(count: int, images: int) -> None:
    expected = binomtest(count, images).proportion_ci(method="wilson")
    share, none = Share(count, images), Share(0, 0)
    assert share == count / images and share.images == images
    assert share.interval() == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert all(map(math.isnan, (none, *none.interval())))


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


# ---- schedule ------------------------------------------------------------------------------------


class Weights(Evaluation):
    """Reports which weights the engine holds."""

    needs = "features"

    def metrics(self, subject: Subject) -> dict[str, float]:
        engine: Any = subject.model
        assert not engine.training
        return {f"{self.settings.name}_value": engine.value}


class FakeEngine:
    training, value = True, 1.0

    def train(self) -> None:
        self.training = True

    def eval(self) -> None:
        self.training = False

    @contextmanager
    def averaged(self) -> Iterator[None]:
        self.value = 2.0
        yield
        self.value = 1.0


def test_each_evaluation_runs_at_its_own_interval_and_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """First the weights, then their average."""
    monkeypatch.setattr(schedule, "EVALUATIONS", {"a": Weights, "b": Weights})
    engine: Any = FakeEngine()
    subject = replace(given_outputs(torch.zeros(1, 2), [0]), model=engine)
    chosen = [
        EvaluationSettingsBase(name=name, every_steps=n) for name, n in (("a", 4), ("b", None))
    ]
    evaluations = ScheduledEvaluations(chosen, subject, engine=engine, has_average=True)
    due = [step for step in range(1, 10) if evaluations.due(step, is_last=step == 9)]
    assert due == [4, 8, 9]
    found = [evaluations.run(4, is_last=False), evaluations.run(9, is_last=True)]
    a, b, of_average = {"val/a_value": 1.0}, {"val/b_value": 1.0}, {"val/ema_a_value": 2.0}
    assert list(map(list, found)) == [[a, of_average], [a, b, of_average, {"val/ema_b_value": 2.0}]]
    assert engine.training


def test_every_entry_is_named_by_its_settings() -> None:
    for name, evaluation in registry.EVALUATIONS.items():
        assert evaluation.Settings.model_fields["name"].default == name
        assert evaluation.needs in get_args(Output)
