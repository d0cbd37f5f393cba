"""Batches one ahead: streams and copies of a GPU are recorded instead of made."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from vitscale.config.errors import RankError
from vitscale.data.loader import Batch
from vitscale.engine.device_batches import DeviceBatches

CPU = torch.device("cpu")
GPU = torch.device("cuda", 1)


def numbered(num: int, *, error: Exception | None = None) -> Iterator[Batch]:
    for number in range(num):
        yield Batch(
            torch.full((2, 3, 4, 4), number), torch.tensor([number] * 2), torch.ones(2)
        )
    if error is not None:
        raise error


@pytest.fixture
def events(monkeypatch) -> list[str]:
    """What a GPU would be told to do, in order."""
    found = []
    copies = object()
    kernels = SimpleNamespace(wait_stream=lambda other: found.append("wait for copies"))

    @contextlib.contextmanager
    def stream(own) -> Iterator[None]:
        assert own is copies
        found.append("on the stream of copies")
        yield
        found.append("on the stream of kernels")

    def copied(batch: Batch, device: torch.device) -> Batch:
        found.append(f"copy {batch.labels[0]}")
        return batch

    def kept(tensor: torch.Tensor, used_by) -> None:
        assert used_by is kernels
        found.append("keep until its kernels ran")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: copies)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: kernels)
    monkeypatch.setattr(Batch, "to", copied)
    monkeypatch.setattr(torch.Tensor, "record_stream", kept)
    return found


def test_kernels_wait_for_their_own_copy_alone(events):
    batches = DeviceBatches(numbered(2), GPU)
    for number in range(2):
        assert int(next(batches).labels[0]) == number
        events.append(f"train on {number}")
        batches.prefetch()
    copy = ["on the stream of copies", "copy {}", "on the stream of kernels"]
    use = ["wait for copies", *["keep until its kernels ran"] * 3, "train on {}"]
    expected = [line.format(0) for line in [*copy, *use]] + [
        each.format(1) for each in copy
    ]
    assert events == expected + [line.format(1) for line in use]


def test_error_of_the_loader_comes_at_its_own_batch(events):
    """The step before it still ends, and with it its checkpoint and its line in the log."""
    batches = DeviceBatches(numbered(1, error=RankError("a worker died")), GPU)
    next(batches)
    batches.prefetch()
    batches.prefetch()
    with pytest.raises(RankError, match="a worker died"):
        next(batches)


def test_cpu_gets_the_batches_themselves_and_none_ahead():
    given = list(numbered(2))
    source = iter(given)
    batches = DeviceBatches(source, CPU)
    batches.prefetch()
    assert next(batches) is given[0]
    batches.prefetch()
    assert next(source) is given[1]
