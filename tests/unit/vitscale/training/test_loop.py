"""Random numbers and learning rates of a step."""

from __future__ import annotations

import torch

from vitscale.training.loop import seed_step


def test_random_numbers_follow_the_position_in_training() -> None:
    def drawn(**changes: int) -> float:
        seed_step(**{"seed": 0, "step": 0, "micro_step": 0, "rank": 0} | changes)
        return torch.rand(()).item()

    other = [drawn(**{name: 1}) for name in ("seed", "step", "micro_step", "rank")]
    assert len({drawn(), *other}) == 5
    assert drawn() == drawn()
