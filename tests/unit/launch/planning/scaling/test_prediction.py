"""The prediction of a run on nodes of GPUs."""

from __future__ import annotations

import pytest

from launch.planning.scaling.cluster import Cluster
from launch.planning.scaling.prediction import Batch, Prediction, line, predict
from pretrain.run import PretrainRun
from vitscale.config.errors import UserError


def predicted(nodes: int, *, gpus: int = 8, batch: Batch = "global") -> Prediction:
    run = PretrainRun.model_validate(
        {
            "name": "x",
            "data": {"path": "shards", "global_batch": 4096},
            "model": {"preset": "H/14"},
            "optim": {"lr": 1e-3, "ema": {"decay": 0.9999}},
            "schedule": {"steps": 100, "warmup_steps": 10},
            "launch": {"nodes": 8, "tasks_per_node": gpus or 8, "gpus_per_node": gpus},
        }
    )
    options = {"cluster": Cluster(), "num_classes": 1000, "total_images": 409_600}
    return predict(run, nodes=nodes, batch=batch, **options)


def test_the_global_batch_is_divided_over_the_gpus() -> None:
    found = predicted(64)
    assert (found.work.micro_batch, found.work.accumulation) == (8, 1)
    assert found.images_per_s == pytest.approx(4096 / found.step.total)
    assert found.efficiency < 0.7


def test_images_of_a_gpu_stay_when_the_batch_grows() -> None:
    found = predicted(64, batch="per GPU")
    assert (found.work.micro_batch, found.work.accumulation) == (64, 1)
    assert found.efficiency > predicted(64).efficiency
    assert predicted(1, batch="per GPU").efficiency == 1


def test_checkpoints_hold_weights_moments_and_the_average() -> None:
    work = predicted(1).work
    assert work.state_bytes == 16 * work.parameters


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(UserError, match="4096 images do not divide over 24 ranks"):
        predicted(3)


def test_runs_without_gpus_are_refused() -> None:
    with pytest.raises(UserError, match=r"launch.gpus_per_node: 0: predictions are for GPUs"):
        predicted(1, gpus=0)


def test_the_line_names_rate_efficiency_and_goodput() -> None:
    text = line(predicted(8))
    for part in ("images/s", "of 8 x one node", "communication", "goodput"):
        assert part in text
