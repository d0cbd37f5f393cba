"""The update guard on one device; batches on the device, one ahead, on a GPU that is recorded."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from vitscale.config.errors import RankError
from vitscale.data.loader import Batch
from vitscale.engine.device_batches import DeviceBatches
from vitscale.engine.gradients import UpdateGuard

BAD_NORMS = [math.nan, math.inf, -1.0]


class Update:
    """One parameter, SGD with rate 1, and a norm that the test sets."""

    def __init__(self, *, clip_norm: float | None = None) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(2))
        self.norm: float | None = None
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0, fused=True)
        self.guard = UpdateGuard(
            self.optimizer,
            clip_norm=clip_norm,
            norm=lambda: self.norm,
            accumulation=1,
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


def test_gradient_above_the_clip_norm_is_scaled_to_it() -> None:
    update = Update(clip_norm=0.5)
    assert update.step(3.0, 4.0) == pytest.approx([0.3, 0.4])
    assert update.step(0.3, -0.1) == pytest.approx([0.3, -0.1])
    assert Update().step(30.0, 40.0) == [30.0, 40.0]


def test_update_with_a_bad_norm_is_skipped_and_counted() -> None:
    update = Update(clip_norm=1.0)
    assert update.health().last_step is None
    for number, norm in enumerate(BAD_NORMS, start=1):
        assert update.step(0.1, 0.2, norm=norm) == [0.0, 0.0]
        assert update.step(0.1, 0.2) == pytest.approx([0.1, 0.2])
        health = update.health()
        assert (health.skipped, health.longest, health.last_step) == (number, 1, 2 * number - 1)


def test_an_optimizer_that_would_ignore_it_is_refused() -> None:
    unfused = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
    with pytest.raises(AssertionError, match="fused"):
        UpdateGuard(unfused, clip_norm=1.0, norm=float, accumulation=1, device=torch.device("cpu"))


def test_a_row_that_ended_before_it_was_looked_at_is_seen() -> None:
    update = Update()
    for norm in (math.nan, math.nan, math.nan, 1.0, math.nan, 1.0):
        update.step(1.0, 0.0, norm=norm)
    assert [update.health().longest for _ in range(2)] == [3, 0]
    for longest in (1, 2):
        update.step(1.0, 0.0, norm=math.nan)
        assert update.health().longest == longest


def test_a_row_that_began_before_a_resume_goes_on_after_it() -> None:
    """Or a run that is stopped often would skip for ever."""
    before, after = Update(), Update()
    for norm in (1.0, math.nan, math.nan):
        before.step(1.0, 0.0, norm=norm)
    after.guard.load_state(before.guard.state())

    after.step(1.0, 0.0, norm=math.nan)
    assert (after.health().skipped, after.guard.state()["steps"]) == (3, 4)
    after.step(1.0, 0.0, norm=math.nan)
    assert after.health().longest == 4


# ---- batches one ahead: streams and copies of a GPU are recorded instead of made ----------------

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


def numbered(num: int, *, error: Exception | None = None) -> Iterator[Batch]:
    for number in range(num):
        yield Batch(torch.full((2, 3, 4, 4), number), torch.tensor([number] * 2), torch.ones(2))
    if error is not None:
        raise error


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a GPU would be told to do, in order."""
    found: list[str] = []
    copies = object()
    kernels = SimpleNamespace(wait_stream=lambda other: found.append("wait for copies"))

    @contextlib.contextmanager
    def stream(own: object) -> Iterator[None]:
        assert own is copies
        found.append("on the stream of copies")
        yield
        found.append("on the stream of kernels")

    def copied(batch: Batch, device: torch.device) -> Batch:
        found.append(f"copy {batch.labels[0]}")
        return batch

    def kept(tensor: torch.Tensor, used_by: object) -> None:
        assert used_by is kernels
        found.append("keep until its kernels ran")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: copies)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: kernels)
    monkeypatch.setattr(Batch, "to", copied)
    monkeypatch.setattr(torch.Tensor, "record_stream", kept)
    return found


def test_kernels_wait_for_their_own_copy_alone(events: list[str]) -> None:
    batches = DeviceBatches(numbered(2), GPU)
    for number in range(2):
        assert int(next(batches).labels[0]) == number
        events.append(f"train on {number}")
        batches.prefetch()
    copy = ["on the stream of copies", "copy {}", "on the stream of kernels"]
    use = ["wait for copies", *["keep until its kernels ran"] * 3, "train on {}"]
    expected = [line.format(0) for line in [*copy, *use]] + [each.format(1) for each in copy]
    assert events == expected + [line.format(1) for line in use]


def test_error_of_the_loader_comes_at_its_own_batch(events: list[str]) -> None:
    """The step before it still ends, and with it its checkpoint and its line in the log."""
    batches = DeviceBatches(numbered(1, error=RankError("a worker died")), GPU)
    next(batches)
    batches.prefetch()
    batches.prefetch()
    with pytest.raises(RankError, match="a worker died"):
        next(batches)


def test_cpu_gets_the_batches_themselves_and_none_ahead() -> None:
    given = list(numbered(2))
    source = iter(given)
    batches = DeviceBatches(source, CPU)
    batches.prefetch()
    assert next(batches) is given[0]
    batches.prefetch()
    assert next(source) is given[1]
