"""Copy batches to the device on a stream of its own, one batch ahead of the training.

Leaves out: loading (`data.loader`), normalisation (`engine`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Protocol, Self, TypeVar

import torch


class Movable(Protocol):
    """A batch in pinned memory or on the device."""

    def to(self, device: torch.device) -> Self: ...

    def keep_for(self, stream: torch.cuda.Stream) -> None: ...


T = TypeVar("T", bound=Movable)


class DeviceBatches(Generic[T]):
    """The batches of an iterator, on the device.

    On a GPU the copy of a batch runs beside the kernels of the batch before it. Its pinned memory
    is used again only after the copy, which torch's allocator watches, and so is its device memory
    after the last kernel that reads it. On a CPU: the batches themselves, none ahead.
    """

    def __init__(self, batches: Iterator[T], device: torch.device) -> None:
        self._batches, self._device = batches, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ahead: T | None = None
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._stream is None:
            return next(self._batches)
        self.prefetch()
        if self._ahead is None:
            assert self._error is not None
            raise self._error
        batch, self._ahead = self._ahead, None
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        batch.keep_for(current)  # its memory belongs to the other stream
        return batch

    def prefetch(self) -> None:
        """On a GPU take the next batch and start its copy, unless that is done.

        To be called when the kernels of a step are launched: what then waits for the loader does
        not stop the device. The end of the batches, or an error, is raised by the next `next`.
        """
        if self._stream is None or self._ahead is not None or self._error is not None:
            return
        try:
            batch = next(self._batches)
        except Exception as error:
            self._error = error
            return
        with torch.cuda.stream(self._stream):
            self._ahead = batch.to(self._device)
