"""When a worker counts as hung, without processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from vitscale.config.errors import RankError
from vitscale.data.loader import TIMEOUT_PARTS, Batch, _watched


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
