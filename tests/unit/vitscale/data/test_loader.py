"""When a worker counts as hung, without processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from vitscale.config.errors import RankError
from vitscale.data.loader import _SLOTS, TIMEOUT_PARTS, Batch, _loader, _watched
from vitscale.data.samples import Unreadable
from vitscale.data.settings import DataSettings


class Scripted:
    """Batches of a DataLoader: `True` gives one, `False` a timeout."""

    def __init__(self, *script: bool) -> None:
        self.script = list(script)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if not self.script:
            raise StopIteration
        if self.script.pop(0):
            return Batch(torch.empty(0), torch.empty(0), torch.empty(0))
        raise RuntimeError("DataLoader timed out after 1 seconds")


def test_timeouts_between_batches_are_not_added_up() -> None:
    """After a pause of the whole job one timeout expires; then batches come again."""
    script = [*[False] * (TIMEOUT_PARTS - 1), True] * 3
    assert len(list(_watched(Scripted(*script), timeout_s=4.0))) == 3


def test_consecutive_timeouts_end_the_run() -> None:
    batches = _watched(Scripted(True, *[False] * TIMEOUT_PARTS, True), timeout_s=4.0)
    next(batches)
    with pytest.raises(RankError, match="gave no batch for 4 s"):
        next(batches)


def test_other_errors_of_the_loader_are_not_retried() -> None:
    class Broken(Scripted):
        def __next__(self) -> Batch:
            raise RuntimeError("out of file descriptors")

    with pytest.raises(RuntimeError, match="descriptors"):
        next(_watched(Broken(), timeout_s=4.0))


def test_workers_are_forked_whatever_the_default() -> None:
    """Another start method would pickle the index for every worker; Python 3.14 has another."""

    class Samples:
        image_size = 8

        def prefetch(self, positions: Sequence[int]) -> None: ...

        def fill(self, position: int, out: torch.Tensor) -> tuple[int, list[Unreadable]]:
            return position, []

    settings = DataSettings(path="unused", global_batch=2, num_workers=2)
    loader = _loader(Samples(), [[0, 1]], batch=2, settings=settings, pin_memory=False)
    _SLOTS.pop(loader.dataset.slots_id)  # type: ignore[attr-defined]  # of our own
    context = loader.multiprocessing_context
    assert context is not None and context.get_start_method() == "fork"
