"""The update guard on one device: clipping, skipped updates and their counts."""

from __future__ import annotations

import math

import pytest
import torch

from vitscale.engine.guard import Health, UpdateGuard

BAD_NORMS = [math.nan, math.inf, -1.0]


class Update:
    """One parameter, SGD with rate 1, and a norm that the test sets."""

    def __init__(self, *, fused: bool, clip_norm: float | None = None) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(2))
        self.norm: float | None = None
        optimizer = torch.optim.SGD([self.weight], lr=1.0, fused=fused)
        self.optimizer = optimizer
        self.guard = UpdateGuard(
            optimizer, clip_norm=clip_norm, norm=lambda: self.norm, device=torch.device("cpu")
        )

    def step(self, *gradient: float, norm: float | None = None) -> list[float]:
        """The change of the weight."""
        before = self.weight.detach().clone()
        self.weight.grad = torch.tensor(gradient)
        self.norm = math.hypot(*gradient) if norm is None else norm
        self.optimizer.step()
        self.guard.finish()
        return (before - self.weight.detach()).tolist()


@pytest.mark.parametrize("fused", [False, True])
def test_gradient_above_the_clip_norm_is_scaled_to_it(fused: bool) -> None:
    update = Update(fused=fused, clip_norm=0.5)
    assert update.step(3.0, 4.0) == pytest.approx([0.3, 0.4])
    assert update.step(0.3, -0.1) == pytest.approx([0.3, -0.1])


@pytest.mark.parametrize("fused", [False, True])
def test_without_a_clip_norm_the_gradient_is_untouched(fused: bool) -> None:
    assert Update(fused=fused).step(30.0, 40.0) == [30.0, 40.0]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("norm", BAD_NORMS)
def test_update_with_a_bad_norm_is_skipped(fused: bool, norm: float) -> None:
    update = Update(fused=fused, clip_norm=1.0)
    assert update.step(0.1, 0.2, norm=norm) == [0.0, 0.0]
    assert update.step(0.1, 0.2) == pytest.approx([0.1, 0.2])


def test_skipped_updates_are_counted() -> None:
    update = Update(fused=False)
    update.step(1.0, 0.0)
    assert update.guard.health(accumulation=1).last_step is None
    for norm in BAD_NORMS[:2]:
        update.step(1.0, 0.0, norm=norm)
    health = update.guard.health(accumulation=1)
    assert (health.skipped, health.longest, health.last_step) == (2, 2, 3)
    update.step(1.0, 0.0)
    health = update.guard.health(accumulation=1)
    assert (health.skipped, health.longest, health.last_step) == (2, 0, 3)


def test_a_row_that_ended_before_it_was_looked_at_is_seen() -> None:
    update = Update(fused=False)
    for norm in (math.nan, math.nan, math.nan, 1.0, math.nan, 1.0):
        update.step(1.0, 0.0, norm=norm)
    assert [update.guard.health(accumulation=1).longest for _ in range(2)] == [3, 0]
    update.step(1.0, 0.0, norm=math.nan)
    assert update.guard.health(accumulation=1).longest == 1
    update.step(1.0, 0.0, norm=math.nan)
    assert update.guard.health(accumulation=1).longest == 2


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_nonfinite_loss_has_nan_gradients(loss: float) -> None:
    guard = Update(fused=False).guard
    weight = torch.ones(1, requires_grad=True)
    guard.checked((weight + loss).sum(), micro_step=0).backward()
    assert weight.grad is not None and weight.grad.isnan().all()


def test_finite_loss_is_not_changed() -> None:
    guard = Update(fused=False).guard
    loss = torch.tensor(0.1, requires_grad=True)
    assert torch.equal(guard.checked(loss, micro_step=0), loss)


def test_micro_step_of_a_bad_loss_is_reported() -> None:
    update = Update(fused=False)
    for micro_step, loss in enumerate([1.0, 1.0, 1.0, math.nan]):
        update.guard.checked(torch.tensor(loss), micro_step=micro_step)
    update.step(1.0, 0.0)
    update.step(1.0, 0.0, norm=math.nan)
    expected = Health(skipped=1, longest=1, last_step=2, bad_micro_steps=(1,))
    assert update.guard.health(accumulation=2) == expected
    # A bad loss of another rank: this rank has no micro-step to report.
    update.step(1.0, 0.0, norm=math.nan)
    assert update.guard.health(accumulation=2).bad_micro_steps == ()
    # Nor is a bad loss of the step after it one of that step.
    update.guard.checked(torch.tensor(math.nan), micro_step=6)
    assert update.guard.health(accumulation=2).bad_micro_steps == ()


def test_counts_survive_export_and_import() -> None:
    first, second = Update(fused=False), Update(fused=False)
    for norm in (math.nan, 1.0, math.nan):
        first.step(1.0, 0.0, norm=norm)
    second.guard.load_state(first.guard.state())
    for update in (first, second):
        update.step(1.0, 0.0, norm=math.nan)
        assert update.guard.state() == {
            "steps": 4,
            "skipped": 3,
            "consecutive": 2,
            "last_skipped_step": 4,
        }
