"""Batches one ahead: streams and copies of a GPU are recorded instead of made."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from vitscale.config.errors import RankError
from vitscale.data.loader import Batch
from vitscale.engine.device_batches import DeviceBatches

CPU = torch.device("cpu")
GPU = torch.device("cuda", 1)


def numbered(num, *, error=None):
    """Batches whose pixels and labels are their number; then perhaps an error."""
    for number in range(num):
        images = torch.full((2, 3, 4, 4), number)
        labels = torch.full((2,), number)
        yield Batch(images, labels, torch.ones(2))
    if error is not None:
        raise error


@pytest.fixture
def events(monkeypatch):
    """What a GPU would be told to do, in order."""
    log = []
    copies = object()
    kernels = SimpleNamespace(wait_stream=lambda other: log.append("wait for copies"))

    @contextlib.contextmanager
    def stream(own):
        assert own is copies
        log.append("on the stream of copies")
        yield
        log.append("on the stream of kernels")

    def copied(batch, device):
        log.append(f"copy {batch.labels[0]}")
        return batch

    # Without this the memory of a batch could be given away while kernels still read it.
    def kept(tensor, used_by):
        assert used_by is kernels
        log.append("keep until its kernels ran")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: copies)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: kernels)
    monkeypatch.setattr(Batch, "to", copied)
    monkeypatch.setattr(torch.Tensor, "record_stream", kept)
    return log


def test_kernels_wait_for_their_own_copy_alone(events):
    batches = DeviceBatches(numbered(2), GPU)
    for number in range(2):
        assert int(next(batches).labels[0]) == number
        events.append(f"train on {number}")

        # The next copy runs while the kernels of this batch do.
        batches.prefetch()

    # The second batch waits for its own copy, which was begun before.
    copy = ["on the stream of copies", "copy {}", "on the stream of kernels"]
    use = ["wait for copies", *["keep until its kernels ran"] * 3, "train on {}"]
    expected = []
    for number in range(2):
        expected += [line.format(number) for line in copy + use]
    assert events == expected


def test_error_of_the_loader_comes_at_its_own_batch(events):
    """The step before it still ends, and with it its checkpoint and its line in the log."""
    loader = numbered(1, error=RankError("a worker died"))
    batches = DeviceBatches(loader, GPU)
    next(batches)

    # The error is met here, and kept.
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

    # A batch taken ahead would take time from the step, and no copy would run meanwhile.
    batches.prefetch()
    assert next(source) is given[1]
