"""When evaluations run, and how their metrics are named."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from tests.support.engine.subjects import given_outputs
from vitscale.evaluation import registry, schedule
from vitscale.evaluation.evaluation import Evaluation, EvaluationSettingsBase, Output, Subject
from vitscale.evaluation.schedule import ScheduledEvaluations


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


@pytest.mark.parametrize("has_average", [False, True])
def test_each_evaluation_runs_at_its_own_interval_and_last(
    monkeypatch: pytest.MonkeyPatch, has_average: bool
) -> None:
    monkeypatch.setattr(schedule, "EVALUATIONS", {"a": Weights, "b": Weights})
    engine: Any = FakeEngine()
    subject = replace(given_outputs(torch.zeros(1, 2), [0]), model=engine)
    chosen = [
        EvaluationSettingsBase(name=name, every_steps=n) for name, n in (("a", 4), ("b", None))
    ]
    evaluations = ScheduledEvaluations(chosen, subject, engine=engine, has_average=has_average)
    due = [step for step in range(1, 10) if evaluations.due(step, is_last=step == 9)]
    assert due == [4, 8, 9]
    of_average = [{"val/ema_a_value": 2.0}, {"val/ema_b_value": 2.0}] if has_average else []
    assert list(evaluations.run(4, is_last=False)) == [{"val/a_value": 1.0}, *of_average[:1]]
    assert list(evaluations.run(9, is_last=True)) == [
        *({"val/a_value": 1.0}, {"val/b_value": 1.0}),
        *of_average,
    ]
    assert engine.training


def test_every_entry_is_named_by_its_settings() -> None:
    for name, evaluation in registry.EVALUATIONS.items():
        assert evaluation.Settings.model_fields["name"].default == name
        assert evaluation.needs in get_args(Output)
