"""When evaluations run, and how their metrics are named."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args

import pytest

from vitscale.evaluation import registry, schedule
from vitscale.evaluation.evaluation import (
    Evaluation,
    EvaluationSettingsBase,
    Output,
    Subject,
)
from vitscale.evaluation.schedule import ScheduledEvaluations


class Weights(Evaluation):
    """Reports which weights the engine holds."""

    Settings = EvaluationSettingsBase
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


@pytest.fixture(autouse=True)
def one_more_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        schedule, "EVALUATIONS", registry.EVALUATIONS | {"a": Weights, "b": Weights}
    )


def scheduled(*settings: tuple[str, int | None], has_average: bool = False) -> ScheduledEvaluations:
    subject: Any = Subject.__new__(Subject)
    engine: Any = FakeEngine()
    object.__setattr__(subject, "model", engine)
    object.__setattr__(subject, "folder", None)
    object.__setattr__(subject, "kept", {})
    chosen = [EvaluationSettingsBase(name=name, every_steps=every) for name, every in settings]
    return ScheduledEvaluations(chosen, subject, engine=engine, has_average=has_average)


def test_each_evaluation_runs_at_its_own_interval_and_last() -> None:
    evaluations = scheduled(("a", 4), ("b", None))
    due = [step for step in range(1, 10) if evaluations.due(step, is_last=step == 9)]
    assert due == [4, 8, 9]
    assert list(evaluations.run(4, is_last=False)) == [{"val/a_value": 1.0}]
    assert list(evaluations.run(9, is_last=True)) == [{"val/a_value": 1.0}, {"val/b_value": 1.0}]


def test_the_average_of_the_weights_is_evaluated_too() -> None:
    evaluations = scheduled(("a", 1), has_average=True)
    assert list(evaluations.run(1, is_last=False)) == [
        {"val/a_value": 1.0},
        {"val/ema_a_value": 2.0},
    ]
    assert evaluations.subject is not None
    assert evaluations.subject.model.training  # type: ignore[attr-defined]  # the stand-in


def test_every_entry_is_named_by_its_settings() -> None:
    for name, evaluation in registry.EVALUATIONS.items():
        assert evaluation.Settings.model_fields["name"].default == name
        assert evaluation.needs in get_args(Output)
