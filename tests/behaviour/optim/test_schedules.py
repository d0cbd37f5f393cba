"""Learning-rate curves at their end points."""

import pytest
import torch
from timm.scheduler.cosine_lr import CosineLRScheduler

from vitscale.optim.settings import ScheduleSettings, learning_rate


def rate(step, decay="cosine", **plan):
    """The rate of a run of 110 steps whose peak is 1 and whose end is 0.1."""
    schedule = ScheduleSettings(decay=decay, final_lr=0.1)
    plan = {
        "warmup_steps": 10,
        "total_steps": 110,
        **plan,
    }
    return learning_rate(step, schedule, peak=1.0, **plan)


def test_decays_reach_their_middle_and_end():
    # Half way between the end of the warm-up and the end both are at the mean of 1 and 0.1.
    for decay in ("linear", "cosine"):
        assert rate(60, decay) == pytest.approx(0.55)
        assert rate(110, decay) == pytest.approx(0.1)
    assert rate(109, "constant") == pytest.approx(1.0)
    assert rate(35, "linear") == pytest.approx(0.1 + 0.9 * 0.75)


def test_decay_from_the_start_is_timms_cosine():
    """DeiT-III's fine-tuning: 50 epochs, 5 of warm-up, 3e-4 to 1e-5."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=3e-4)
    timm = CosineLRScheduler(
        optimizer,
        t_initial=50,
        lr_min=1e-5,
        warmup_t=5,
        warmup_lr_init=1e-6,
    )

    def ours(epoch, decay_from):
        # 625 steps an epoch.
        schedule = ScheduleSettings(final_lr=1e-5, decay_from=decay_from)
        return learning_rate(
            625 * epoch,
            schedule,
            peak=3e-4,
            warmup_steps=3125,
            total_steps=31_250,
        )

    # timm has one rate for a whole epoch, ours is compared where the epoch begins.
    for epoch in range(5, 50):
        timm.step(epoch)
        expected = optimizer.param_groups[0]["lr"]
        assert ours(epoch, "start") == pytest.approx(expected, rel=1e-12)

    # Decay from the end of the warm-up is another curve.
    assert ours(29, "warmup_end") > 1.17 * ours(29, "start")


def test_constant_stays_at_the_peak_and_cools_down_at_the_end():
    plan = {
        "warmup_steps": 5,
        "total_steps": 50,
        "cooldown_steps": 20,
    }
    rates = [rate(step, "constant", **plan) for step in range(51)]
    assert rates[5:31] == pytest.approx([1.0] * 26)

    # The cool-down is a line from the peak in step 30 to the end in step 50.
    line = [0.1 + 0.9 * (1 - i / 20) for i in range(21)]
    assert rates[30:] == pytest.approx(line)


def test_drops_are_those_of_bits_hyperrule():
    """Written out: rise to the first support, a tenth at each of the others."""
    schedule = ScheduleSettings(decay="drops", drops_at=(0.3, 0.6, 0.9))
    supports = [500, 6000, 12_000, 18_000, 20_000]
    for step in range(supports[-1]):
        num_drops = sum(step >= support for support in supports[1:-1])
        slow = 0.1**num_drops
        if step < supports[0]:
            slow = (step + 1) / supports[0]
        ours = learning_rate(
            step,
            schedule,
            peak=0.003,
            warmup_steps=500,
            total_steps=20_000,
        )
        assert ours == pytest.approx(0.003 * slow), step
