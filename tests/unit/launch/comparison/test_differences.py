"""Metrics and parameters of compared runs."""

from __future__ import annotations

import math

import pytest

from launch.comparison.differences import compare
from launch.comparison.runs import ComparedRun
from vitscale.tracking.journal import Row


def run(
    label: str, *metrics: dict[str, float], params: dict[str, str] | None = None
) -> ComparedRun:
    rows = tuple(
        Row(step=step, time=float(step), metrics=each) for step, each in enumerate(metrics, start=1)
    )
    return ComparedRun(
        label=label, source=label, folder=None, status=None, params=params or {}, rows=rows
    )


@pytest.mark.parametrize(
    ("key", "values", "best"),
    [
        ("train/loss", (math.nan, 3.0, 2.0, math.nan, -math.inf, 4.0), 2.0),
        ("val/top1", (math.nan, 0.5, 0.75, math.inf, 0.25), 0.75),
        ("val/ema_top1", (math.nan,), None),
        ("train/lr", (0.1, 0.2), None),  # neither direction is better
    ],
)
def test_best_ignores_values_that_are_not_finite(
    key: str, values: tuple[float, ...], best: float | None
) -> None:
    (line,) = compare([run("a", *({key: value} for value in values))]).metrics
    assert line.best == (best,)
    assert line.final == pytest.approx((values[-1],), nan_ok=True)


def test_changes_follow_the_direction_of_the_metric() -> None:
    compared = compare(
        [
            run("a", {"train/loss": 2.0, "val/top1": 0.5}),
            run("b", {"train/loss": 1.5, "val/top1": 0.5}),
            run("c", {"train/loss": math.nan, "val/top1": 0.25}),
            run("d", {"vitals/mfu": 0.5}),
        ]
    )
    changes = {line.key: [line.change(delta) for delta in line.deltas] for line in compared.metrics}
    assert changes["train/loss"] == [None, "better", None, None]
    assert changes["val/top1"] == [None, "equal", "worse", None]
    assert changes["vitals/mfu"] == [None] * 4


def test_only_differing_parameters_are_listed() -> None:
    params = {"seed": "7", "optim.lr": "0.1"}
    first = run("a", {"x": 1.0}, params=params)
    second = run("b", {"x": 1.0}, params=params | {"optim.lr": "0.2", "model.depth": "3"})
    compared = compare([first, second])
    assert compared.params == (("model.depth", (None, "3")), ("optim.lr", ("0.1", "0.2")))
    assert compared.num_equal_params == 1
    assert len(compare([first]).params) == 2
    other = run("c", {"x": 1.0}, params=params | {"output": "c", "tracking.tags.chain": "s"})
    assert compare([first, other]).params == ()
    assert compare([first, other]).num_equal_params == 2
