"""Learning-rate curves at their end points."""

from __future__ import annotations

import pytest
import torch
from timm.scheduler.cosine_lr import CosineLRScheduler

from vitscale.optim.settings import ScheduleSettings, learning_rate


def rate(step: int, decay: str = "cosine", **plan: int) -> float:
    schedule = ScheduleSettings(decay=decay, final_lr=0.1)
    return learning_rate(
        step, schedule, **{"peak": 1.0, "warmup_steps": 10, "total_steps": 110} | plan
    )


def test_decays_reach_their_middle_and_end() -> None:
    assert rate(60, "linear") == rate(60, "cosine") == pytest.approx(0.55)
    assert rate(110, "linear") == rate(110, "cosine") == pytest.approx(0.1)
    assert rate(109, "constant") == pytest.approx(1.0)
    assert rate(35, "linear") == pytest.approx(0.1 + 0.9 * 0.75)


def test_decay_from_the_start_is_timms_cosine() -> None:
    """DeiT-III's fine-tuning: 50 epochs, 5 of warm-up, 3e-4 to 1e-5."""
    per_epoch, optimizer = (
        625,
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4),
    )
    timm = CosineLRScheduler(
        optimizer, t_initial=50, lr_min=1e-5, warmup_t=5, warmup_lr_init=1e-6
    )
    plan = {"warmup_steps": 5 * per_epoch, "total_steps": 50 * per_epoch}
    start, end = (
        ScheduleSettings(final_lr=1e-5, decay_from=each)
        for each in ("start", "warmup_end")
    )
    for epoch in range(5, 50):
        timm.step(epoch)
        expected, step = optimizer.param_groups[0]["lr"], epoch * per_epoch
        found = learning_rate(step, start, peak=3e-4, **plan)
        assert found == pytest.approx(expected, rel=1e-12)
        assert (
            epoch != 29 or learning_rate(step, end, peak=3e-4, **plan) > 1.17 * expected
        )


def test_constant_stays_at_the_peak_and_cools_down_at_the_end() -> None:
    plan = {"warmup_steps": 5, "total_steps": 50, "cooldown_steps": 20}
    rates = [rate(step, "constant", **plan) for step in range(51)]
    assert rates[5:31] == pytest.approx([1.0] * 26)
    assert rates[30:] == pytest.approx([0.1 + 0.9 * (1 - i / 20) for i in range(21)])


def test_drops_are_those_of_bits_hyperrule() -> None:
    """Written out: rise to the first support, a tenth at each of the others."""
    schedule = ScheduleSettings(decay="drops", drops_at=(0.3, 0.6, 0.9))
    supports = [500, 6000, 12_000, 18_000, 20_000]
    for step in range(supports[-1]):
        slow = 0.1 ** sum(step >= support for support in supports[1:-1])
        slow = (step + 1) / supports[0] if step < supports[0] else slow
        ours = learning_rate(
            step, schedule, peak=0.003, warmup_steps=500, total_steps=20_000
        )
        assert ours == pytest.approx(0.003 * slow), step
