"""Loss spikes, and positions of a micro-batch."""

from __future__ import annotations

import math

from vitscale.data.order import rank_batches
from vitscale.runs.training import TrainingPlan
from vitscale.training.detectors import (
    MIN_REMEMBERED,
    NUM_REMEMBERED,
    LossSpikeDetector,
    positions_of_step,
)

PLAN = TrainingPlan(
    world_size=2,
    global_batch=12,
    micro_batch=3,
    accumulation=2,
    num_samples=100,
    total_steps=9,
    warmup_steps=0,
    cooldown_steps=0,
)


def spikes_in(losses: list[float]) -> list[int]:
    detector = LossSpikeDetector()
    return [number for number, loss in enumerate(losses) if detector.update(loss) is not None]


def test_falling_and_noisy_losses_are_no_spikes() -> None:
    assert spikes_in([7 / (1 + number / 10) + 0.05 * (-1) ** number for number in range(60)]) == []


def test_every_interval_of_a_jump_is_a_spike() -> None:
    steady = [2.0, 2.1, 1.9, 2.0, 2.05, 1.95, 2.0, 2.1, 2.0]
    assert spikes_in([*steady, 4.0, 4.1, 2.0, 4.0]) == [9, 10, 12]


def test_no_spike_before_enough_intervals() -> None:
    assert spikes_in([1.0] * (MIN_REMEMBERED - 1) + [9.0]) == []
    assert spikes_in([1.0] * MIN_REMEMBERED + [9.0]) == [MIN_REMEMBERED]


def test_only_the_last_intervals_count() -> None:
    assert spikes_in([9.0] * NUM_REMEMBERED + [1.0] * NUM_REMEMBERED + [5.0]) == [
        2 * NUM_REMEMBERED
    ]


def test_losses_that_are_not_finite_are_ignored() -> None:
    assert spikes_in([1.0] * 10 + [math.nan, math.inf, 1.0]) == []


def test_restored_detector_continues_as_the_saved_one() -> None:
    detector = LossSpikeDetector()
    for number in range(NUM_REMEMBERED + 5):
        detector.update(1.0 + number / 100)
    detector.update(9.0)
    again = LossSpikeDetector()
    again.load_state(detector.state())
    assert again == detector and len(again.recent) == NUM_REMEMBERED and again.num_spikes == 1


def test_positions_of_a_micro_batch_are_those_the_rank_reads() -> None:
    step = 3
    for rank in range(2):
        batches = rank_batches(start=24, stop=36, rank=rank, world_size=2, micro_batch=3)
        for number, expected in enumerate(batches):
            found = positions_of_step(PLAN, step=step, micro_steps={rank: (number,)})
            assert found == expected
    assert positions_of_step(PLAN, step=step, micro_steps={}) == list(range(24, 36))
