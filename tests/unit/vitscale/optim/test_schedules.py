"""Learning-rate curves at their end points."""

from __future__ import annotations

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


def test_decay_from_the_start_is_timms_cosine() -> None:
    """DeiT-III's fine-tuning: 50 epochs, 5 of warm-up, 3e-4 to 1e-5."""
    per_epoch, optimizer = 625, torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    timm = CosineLRScheduler(optimizer, t_initial=50, lr_min=1e-5, warmup_t=5, warmup_lr_init=1e-6)
    plan = {"warmup_steps": 5 * per_epoch, "total_steps": 50 * per_epoch, "decay": "cosine"}

    def ours(step: int, decay_from: str) -> float:
        return learning_rate(step, peak=3e-4, final=1e-5, decay_from=decay_from, **plan)

    for epoch in range(5, 50):
        timm.step(epoch)
        expected = optimizer.param_groups[0]["lr"]
        assert ours(epoch * per_epoch, "start") == pytest.approx(expected, rel=1e-12)
        assert epoch != 29 or ours(epoch * per_epoch, "warmup_end") > 1.17 * expected
    assert ours(100, "start") == ours(100, "warmup_end") == pytest.approx(3e-4 * 101 / 3125)


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
    ("settings", "keys"),
    [
        ({"decay": "cosine", "cooldown_share": 0.2}, ["cooldown_share"]),
        ({"decay": "constant", "final_lr": 1e-5}, ["final_lr"]),
        ({"decay": "constant", "decay_from": "start"}, ["decay_from"]),
        ({"warmup_steps": 5, "warmup_epochs": 0.1}, ["warmup_epochs"]),
        ({"decay": "drops"}, ["drops_at"]),
        ({"decay": "drops", "drops_at": [0.6, 0.3]}, ["drops_at"]),
        ({"decay": "drops", "drops_at": [0.6, 1.0]}, ["drops_at"]),
        ({"decay": "drops", "drops_at": [0.6], "final_lr": 0.1}, ["final_lr"]),
        ({"decay": "drops", "drops_at": [0.6], "decay_from": "start"}, ["decay_from"]),
        ({"decay": "cosine", "drops_at": [0.6]}, ["drops_at"]),
        ({"decay": "drops", "drops_at": [0.3, 0.6]}, []),
        ({"decay": "linear", "final_lr": 1e-5}, []),
        ({"decay": "cosine", "decay_from": "start"}, []),
        ({"decay": "constant", "cooldown_share": 0.2, "final_lr": 1e-5}, []),
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, object], keys: list[str]) -> None:
    problems = schedule_problems(ScheduleSettings.model_validate({"steps": 9, **settings}))
    assert [key for key, _ in problems] == [f"schedule.{key}" for key in keys]
