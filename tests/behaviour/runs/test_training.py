"""Plans and problems of the rates of a run."""

from __future__ import annotations

import pytest

from pretrain.run import PretrainRun
from vitscale.config.errors import UserError
from vitscale.runs.training import training_plan


def run(**changes: dict[str, object]) -> PretrainRun:
    sections: dict[str, dict[str, object]] = {
        "data": {"path": "shards", "global_batch": 8},
        "model": {"preset": "B/16"},
        "optim": {"lr": 1e-3},
        "schedule": {"steps": 100, "warmup_steps": 10},
    }
    for group, values in changes.items():
        sections[group] = sections.get(group, {}) | values
    return PretrainRun.model_validate({"name": "x", **sections})


def test_cooldown_of_a_plan_is_its_share_of_the_steps() -> None:
    for share, steps in ((0.25, 25), (0.001, 1), (0.0, 0)):
        chosen = run(schedule={"decay": "constant", "cooldown_share": share})
        plan = training_plan(chosen, world_size=1, num_samples=8)
        assert (plan.total_steps, plan.cooldown_steps) == (100, steps)
    late = run(schedule={"decay": "constant", "cooldown_share": 0.95})
    with pytest.raises(UserError, match="schedule.cooldown_share: 10 .* and 95 of cool-down"):
        training_plan(late, world_size=1, num_samples=8)


def test_warmup_of_a_plan_may_be_given_in_epochs() -> None:
    short = run(schedule={"warmup_steps": 0, "warmup_epochs": 3})
    assert training_plan(short, world_size=1, num_samples=83).warmup_steps == 31
    with pytest.raises(UserError, match="schedule.warmup_epochs: 150 .* in 100 steps"):
        training_plan(short, world_size=1, num_samples=400)


def test_conflicts_of_several_sections_come_together() -> None:
    wrong = run(schedule={"cooldown_share": 0.1}, optim={"name": "lamb"}, engine={"zero_stage": 2})
    keys = [key for key, _ in wrong.problems()]
    assert keys == ["schedule.cooldown_share", "engine.zero_stage"]
    ((key, why),) = run(engine={"compile": True, "zero_stage": 3}).problems()
    assert key == "engine.compile" and "hooks break blocks apart" in why
    assert not list(run().problems())


def test_micro_batch_is_the_largest_that_fits() -> None:
    wide = run(data={"global_batch": 24}, engine={"max_micro_batch": 8})
    plan = training_plan(wide, world_size=2, num_samples=8)
    assert (plan.micro_batch, plan.accumulation) == (6, 2)
    mixed = run(data={"global_batch": 18, "mixing": {}}, engine={"max_micro_batch": 9})
    with pytest.raises(UserError, match="no even micro-batch divides the 9 images"):
        training_plan(mixed, world_size=2, num_samples=8)


def test_batch_that_does_not_divide_names_its_neighbours() -> None:
    with pytest.raises(UserError, match="multiples of 3: 6 or 9"):
        training_plan(run(), world_size=3, num_samples=8)
    with pytest.raises(UserError, match="multiples of 16: 16\\n"):
        training_plan(run(), world_size=16, num_samples=8)
