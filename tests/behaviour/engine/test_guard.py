"""The update guard on one device: clipping, skipped updates and their counts."""

from __future__ import annotations

import math

import pytest
import torch

from vitscale.engine.gradients import UpdateGuard

BAD_NORMS = [math.nan, math.inf, -1.0]


class Update:
    """One parameter, SGD with rate 1, and a norm that the test sets."""

    def __init__(
        self, *, clip_norm: float | None = None, accumulation: int = 1, fused: bool = True
    ) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(2))
        self.norm: float | None = None
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0, fused=fused)
        self.guard = UpdateGuard(
            self.optimizer,
            clip_norm=clip_norm,
            norm=lambda: self.norm,
            accumulation=accumulation,
            device=torch.device("cpu"),
        )
        self.health = self.guard.health

    def step(self, *gradient: float, norm: float | None = None) -> list[float]:
        """The change of the weight."""
        before = self.weight.detach().clone()
        self.weight.grad = torch.tensor(gradient)
        self.norm = math.hypot(*gradient) if norm is None else norm
        self.optimizer.step()
        self.guard.finish()
        return (before - self.weight.detach()).tolist()


@pytest.mark.parametrize("fused", [True, False])
def test_gradient_above_the_clip_norm_is_scaled_to_it(fused: bool) -> None:
    update = Update(clip_norm=0.5, fused=fused)
    assert update.step(3.0, 4.0) == pytest.approx([0.3, 0.4])
    assert update.step(0.3, -0.1) == pytest.approx([0.3, -0.1])
    assert Update(fused=fused).step(30.0, 40.0) == [30.0, 40.0]


@pytest.mark.parametrize("fused", [True, False])
def test_update_with_a_bad_norm_is_skipped_and_counted(fused: bool) -> None:
    update = Update(clip_norm=1.0, fused=fused)
    assert update.health().last_step is None
    for number, norm in enumerate(BAD_NORMS, start=1):
        assert update.step(0.1, 0.2, norm=norm) == [0.0, 0.0]
        assert update.step(0.1, 0.2) == pytest.approx([0.1, 0.2])
        health = update.health()
        assert (health.skipped, health.longest, health.last_step) == (number, 1, 2 * number - 1)


def test_a_row_that_ended_before_it_was_looked_at_is_seen() -> None:
    update = Update()
    for norm in (math.nan, math.nan, math.nan, 1.0, math.nan, 1.0):
        update.step(1.0, 0.0, norm=norm)
    assert [update.health().longest for _ in range(2)] == [3, 0]
    for longest in (1, 2):
        update.step(1.0, 0.0, norm=math.nan)
        assert update.health().longest == longest
