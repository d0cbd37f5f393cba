"""Learning-rate curves at their corners."""

from __future__ import annotations

import pytest

from vitscale.schedules import DECAYS, learning_rate


def rate(step: int, decay: str = "cosine", warmup_steps: int = 10) -> float:
    return learning_rate(
        step, peak=1.0, final=0.1, warmup_steps=warmup_steps, total_steps=110, decay=decay
    )


@pytest.mark.parametrize("decay", sorted(DECAYS))
def test_warmup_is_linear_and_reaches_the_peak(decay: str) -> None:
    assert rate(0, decay) == pytest.approx(0.1)
    assert rate(4, decay) == pytest.approx(0.5)
    assert rate(9, decay) == rate(10, decay) == pytest.approx(1.0)


def test_decays_pass_their_middle_and_end() -> None:
    assert rate(60, "linear") == rate(60, "cosine") == pytest.approx(0.55)
    assert rate(110, "linear") == rate(110, "cosine") == pytest.approx(0.1)
    assert rate(109, "constant") == pytest.approx(1.0)
    assert rate(35, "linear") == pytest.approx(0.1 + 0.9 * 0.75)


def test_no_warmup_starts_at_the_peak() -> None:
    assert rate(0, warmup_steps=0) == pytest.approx(1.0)
