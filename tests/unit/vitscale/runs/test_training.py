"""Plans and problems of the rates of a run."""

from __future__ import annotations

import pytest

from pretrain.run import PretrainRun
from vitscale.config.errors import UserError
from vitscale.runs.training import training_plan, training_plans


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
    plan = training_plan(
        run(schedule={"decay": "rsqrt", "cooldown_share": 0.25}), world_size=1, num_samples=8
    )
    assert (plan.total_steps, plan.cooldown_steps) == (100, 25)
    assert training_plan(run(), world_size=1, num_samples=8).cooldown_steps == 0


def test_warmup_of_a_plan_may_be_given_in_epochs() -> None:
    short = run(schedule={"warmup_steps": 0, "warmup_epochs": 3})
    assert training_plan(short, world_size=1, num_samples=80).warmup_steps == 30
    with pytest.raises(UserError, match="schedule.warmup_epochs: 150 warm-up steps leave nothing"):
        training_plan(short, world_size=1, num_samples=400)


def test_cooldown_that_begins_inside_the_warmup_is_refused() -> None:
    late = run(schedule={"decay": "constant", "cooldown_share": 0.95})
    with pytest.raises(UserError, match="95 steps of cool-down begin before the 10 steps"):
        training_plan(late, world_size=1, num_samples=8)


def test_schedule_and_optimizer_conflicts_come_together() -> None:
    wrong = run(schedule={"cooldown_share": 0.1}, optim={"name": "lamb"}, engine={"zero_stage": 2})
    keys = [key for key, _ in wrong.problems()]
    assert keys == ["schedule.cooldown_share", "engine.zero_stage"]
    assert not list(run().problems())


@pytest.mark.parametrize("compiled", [True, "model"])
def test_compiling_under_zero_3_is_refused(compiled: object) -> None:
    ((key, why),) = run(engine={"compile": compiled, "zero_stage": 3}).problems()
    assert key == "engine.compile" and "hooks break blocks apart" in why


def test_warmup_as_long_as_the_run_is_refused() -> None:
    with pytest.raises(UserError, match="100 warm-up steps leave nothing of 100 steps"):
        training_plan(run(schedule={"warmup_steps": 100}), world_size=1, num_samples=8)


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


def sizes(*pairs: tuple[int, float | None], **more: object) -> dict[str, object]:
    return {"resolutions": [{"image_size": size, "until": until, **more} for size, until in pairs]}


def test_a_plan_for_each_image_size() -> None:
    several = run(
        schedule=sizes((64, 0.25), (128, 0.5), (224, None)), engine={"max_micro_batch": 4}
    )
    plans = training_plans(several, world_size=1, num_samples=80)
    assert [(plan.image_size, plan.start, plan.stop) for plan in plans] == [
        (64, 0, 25),
        (128, 25, 50),
        (224, 50, 100),
    ]
    at = {step: training_plan(several, world_size=1, num_samples=80, step=step).image_size
          for step in (0, 24, 25, 49, 50, 99, 100)}  # fmt: skip
    assert at == {0: 64, 24: 64, 25: 128, 49: 128, 50: 224, 99: 224, 100: 224}
    smaller = run(schedule=sizes((64, 0.25), (224, None), max_micro_batch=2))
    plan = training_plan(smaller, world_size=2, num_samples=80)
    assert (plan.micro_batch, plan.accumulation) == (2, 2)
    assert not plan.has_one_image_size
    assert training_plan(run(), world_size=1, num_samples=80).has_one_image_size


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (sizes(), "two image sizes at least"),
        (sizes((224, None)), "two image sizes at least"),
        (sizes((128, 0.5), (64, None)), "do not increase"),
        (sizes((64, 0.5), (128, None)), "the last image size is 128, but model.image_size is 224"),
        (sizes((64, None), (224, None)), "every image size but the last needs `until`"),
        (sizes((64, 0.5), (224, 0.9)), "every image size but the last needs `until`"),
        (sizes((64, 0.5), (128, 0.5), (224, None)), "shares until [0.5, 0.5] do not increase"),
        (sizes((100, 0.5), (224, None)), "100 px is not a multiple of the 16 px patch"),
    ],
)
def test_an_impossible_list_of_sizes_is_one_message(
    schedule: dict[str, object], message: str
) -> None:
    problems = [text for key, text in run(schedule=schedule).problems()
                if key == "schedule.resolutions"]  # fmt: skip
    assert any(message in text for text in problems)


def test_a_sequence_of_sizes_is_of_squares() -> None:
    wide = {"preset": "B/16", "image_size": [224, 448]}
    (problem,) = run(model=wide, schedule=sizes((64, 0.5), (224, None))).problems()
    assert problem[0] == "schedule.resolutions" and "224 x 448, but a sequence" in problem[1]
    plan = training_plan(run(model=wide), world_size=1, num_samples=80)
    assert plan.image_size == (224, 448) and plan.has_one_image_size


def test_an_image_size_without_a_step_is_refused() -> None:
    with pytest.raises(UserError, match="no step of 100 is left for 64 px"):
        training_plan(run(schedule=sizes((64, 0.001), (224, None))), world_size=1, num_samples=8)
