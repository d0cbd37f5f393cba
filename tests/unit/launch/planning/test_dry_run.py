"""The plan that a dry run shows."""

from __future__ import annotations

from launch.planning.dry_run import plan_rows
from pretrain.run import PretrainRun


def plan(**changes: object) -> dict[str, str]:
    sections: dict[str, object] = {
        "data": {"path": "shards", "global_batch": 64, "planned_num_samples": 1000},
        "model": {"preset": "Ti/16", "num_classes": 10},
        "optim": {"lr": 1e-3},
        "schedule": {"steps": 100, "warmup_steps": 10},
    }
    return dict(plan_rows(PretrainRun.model_validate({"name": "x", **sections, **changes})))


def test_bf16_momentum_halves_the_momentum() -> None:
    momentum = {
        dtype: plan(optim={"lr": 1e-3, "momentum_dtype": dtype})["memory per process"]
        for dtype in ("fp32", "bf16")
    }
    # 5.5 M parameters: 8 bytes each with two fp32 moments, 6 with one of them in bf16.
    assert "0.04 GiB optimiser" in momentum["fp32"]
    assert "0.03 GiB optimiser" in momentum["bf16"]


def test_objective_and_evaluations_are_named() -> None:
    evaluate = [{"name": "knn", "every_steps": 2000}, {"name": "classification"}]
    rows = plan(evaluate=evaluate)
    assert rows["objective"] == "supervised"
    assert rows["evaluation"] == (
        "knn every 2,000 steps, classification; all after the last step, on 'test'"
    )
    assert plan(evaluate=[])["evaluation"] == "none"
    data = {"path": "shards", "global_batch": 64, "val_split": None}
    assert plan(data=data)["evaluation"] == "none, because data.val_split is null"
