"""Learning-rate curves at their end points."""

from __future__ import annotations

import math

import pytest
import torch
from timm.scheduler.cosine_lr import CosineLRScheduler

from vitscale.optim.schedules import (
    SCHEDULES,
    ScheduleSettings,
    cooldown_steps,
    learning_rate,
    schedule_problems,
    warmup_steps,
)


def rate(step: int, decay: str = "cosine", warmup_steps: int = 10) -> float:
    return learning_rate(
        step, peak=1.0, final=0.1, warmup_steps=warmup_steps, total_steps=110, decay=decay
    )


@pytest.mark.parametrize("decay", sorted(SCHEDULES))
def test_warmup_is_linear_and_reaches_the_peak(decay: str) -> None:
    assert rate(0, decay) == pytest.approx(0.1)
    assert rate(4, decay) == pytest.approx(0.5)
    assert rate(9, decay) == rate(10, decay) == pytest.approx(1.0)


def test_decays_reach_their_middle_and_end() -> None:
    assert rate(60, "linear") == rate(60, "cosine") == pytest.approx(0.55)
    assert rate(110, "linear") == rate(110, "cosine") == pytest.approx(0.1)
    assert rate(109, "constant") == pytest.approx(1.0)
    assert rate(35, "linear") == pytest.approx(0.1 + 0.9 * 0.75)


def test_no_warmup_starts_at_the_peak() -> None:
    assert rate(0, warmup_steps=0) == pytest.approx(1.0)


def timm_cosine(epoch: float, *, peak: float, final: float, epochs: int, warmup: int) -> float:
    """timm's `CosineLRScheduler` with its defaults, after the warm-up."""
    assert epoch >= warmup
    return final + 0.5 * (peak - final) * (1 + math.cos(math.pi * epoch / epochs))


def test_decay_from_the_start_is_timms_cosine() -> None:
    """DeiT-III's fine-tuning: 50 epochs, 5 of warm-up, 3e-4 to 1e-5."""
    per_epoch, deit = 625, {"peak": 3e-4, "final": 1e-5}
    steps = {"warmup_steps": 5 * per_epoch, "total_steps": 50 * per_epoch, "decay": "cosine"}
    for epoch in range(5, 51):
        own = learning_rate(epoch * per_epoch, decay_from="start", **deit, **steps)
        assert own == pytest.approx(timm_cosine(epoch, epochs=50, warmup=5, **deit), rel=1e-12)
    after = learning_rate(29 * per_epoch, **deit, **steps)
    assert after / timm_cosine(29, epochs=50, warmup=5, **deit) == pytest.approx(1.176, abs=0.001)
    warming = [
        learning_rate(100, decay_from=origin, **deit, **steps) for origin in ("start", "warmup_end")
    ]
    assert warming[0] == warming[1] == pytest.approx(3e-4 * 101 / 3125)


def test_timms_own_scheduler_has_the_rates_of_the_formula() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=3e-4)
    scheduler = CosineLRScheduler(
        optimizer, t_initial=50, lr_min=1e-5, warmup_t=5, warmup_lr_init=1e-6
    )
    for epoch in range(5, 50):
        scheduler.step(epoch)
        expected = timm_cosine(epoch, peak=3e-4, final=1e-5, epochs=50, warmup=5)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected, rel=1e-12)


def test_constant_stays_at_the_peak_and_cools_down_at_the_end() -> None:
    rates = [
        learning_rate(
            step, peak=1.0, final=0.1, warmup_steps=5, total_steps=50, decay="constant",
            cooldown_steps=20,
        )
        for step in range(51)
    ]  # fmt: skip
    assert rates[5:31] == pytest.approx([1.0] * 26)
    assert rates[30:] == pytest.approx([0.1 + 0.9 * (1 - i / 20) for i in range(21)])


@pytest.mark.parametrize("decay", sorted(SCHEDULES.keys() - {"drops"}))
def test_curves_have_no_jump_and_only_fall_after_the_warmup(decay: str) -> None:
    cooldown = 2_000 if decay == "constant" else 0
    rates = [
        learning_rate(
            step, peak=1.0, final=0.0, warmup_steps=1_000, total_steps=10_000, decay=decay,
            cooldown_steps=cooldown,
        )
        for step in range(10_001)
    ]  # fmt: skip
    steps = [after - before for before, after in zip(rates, rates[1:], strict=False)]
    assert max(map(abs, steps)) < 0.0011
    assert max(steps[1_000:]) <= 1e-12
    assert max(rates) == pytest.approx(1.0) and rates[-1] == pytest.approx(0.0, abs=1e-12)


def bit_rate(step: int, supports: list[int]) -> float:
    """BiT's HyperRule, written out: rise to the first support, a tenth at each of the others."""
    if step < supports[0]:
        return (step + 1) / supports[0]
    return 0.1 ** sum(step >= support for support in supports[1:-1])


@pytest.mark.parametrize(
    ("supports", "drops_at"),
    [
        ([100, 200, 300, 400, 500], (0.4, 0.6, 0.8)),
        ([500, 3000, 6000, 9000, 10_000], (0.3, 0.6, 0.9)),
        ([500, 6000, 12_000, 18_000, 20_000], (0.3, 0.6, 0.9)),
    ],
)
def test_drops_are_those_of_bits_hyperrule(
    supports: list[int], drops_at: tuple[float, ...]
) -> None:
    for step in range(supports[-1]):
        ours = learning_rate(
            step, peak=0.003, final=0.0, warmup_steps=supports[0], total_steps=supports[-1],
            decay="drops", drops_at=drops_at,
        )  # fmt: skip
        assert ours == pytest.approx(0.003 * bit_rate(step, supports)), step


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"decay": "drops"}, "schedule.drops_at"),
        ({"decay": "drops", "drops_at": [0.6, 0.3]}, "schedule.drops_at"),
        ({"decay": "drops", "drops_at": [0.6, 1.0]}, "schedule.drops_at"),
        ({"decay": "drops", "drops_at": [0.6], "final_lr": 0.1}, "schedule.final_lr"),
        ({"decay": "drops", "drops_at": [0.6], "decay_from": "start"}, "schedule.decay_from"),
        ({"decay": "cosine", "drops_at": [0.6]}, "schedule.drops_at"),
    ],
)
def test_drops_without_effect_are_refused(settings: dict[str, object], key: str) -> None:
    problems = schedule_problems(ScheduleSettings.model_validate({"steps": 10, **settings}))
    assert [found for found, _ in problems] == [key]


def test_rate_depends_on_the_step_alone() -> None:
    """A resumed run computes the same rate as an uninterrupted one."""

    def rates(steps: range) -> list[float]:
        return [
            learning_rate(
                step, peak=3e-3, final=1e-5, warmup_steps=3, total_steps=40, decay="constant",
                cooldown_steps=30,
            )
            for step in steps
        ]  # fmt: skip

    assert rates(range(40))[17:] == rates(range(17, 40))


def test_cooldown_is_a_share_of_all_steps() -> None:
    assert cooldown_steps(0.0, total_steps=100) == 0
    assert cooldown_steps(0.2, total_steps=100) == 20
    assert cooldown_steps(0.001, total_steps=100) == 1


def test_warmup_in_epochs_is_counted_in_whole_steps() -> None:
    counts = {"num_samples": 1000, "global_batch": 64}
    assert warmup_steps(ScheduleSettings(warmup_epochs=5), **counts) == 78
    assert warmup_steps(ScheduleSettings(warmup_steps=9), **counts) == 9
    assert warmup_steps(ScheduleSettings(), **counts) == 0


@pytest.mark.parametrize(
    "settings, where",
    [
        ({"decay": "cosine", "cooldown_share": 0.2}, "schedule.cooldown_share"),
        ({"decay": "constant", "final_lr": 1e-5}, "schedule.final_lr"),
        ({"decay": "constant", "decay_from": "start"}, "schedule.decay_from"),
        ({"warmup_steps": 5, "warmup_epochs": 0.1}, "schedule.warmup_epochs"),
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, object], where: str) -> None:
    problems = list(schedule_problems(ScheduleSettings.model_validate({"steps": 9, **settings})))
    assert [key for key, _ in problems] == [where]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"decay": "linear", "final_lr": 1e-5},
        {"decay": "cosine", "decay_from": "start"},
        {"decay": "constant"},
        {"decay": "constant", "cooldown_share": 0.2, "final_lr": 1e-5},
    ],
)
def test_sensible_settings_raise_no_problem(settings: dict[str, object]) -> None:
    assert not list(schedule_problems(ScheduleSettings.model_validate({"steps": 9, **settings})))
