"""Copy batches to the device, one batch ahead of the training, and normalise their pixels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

# A batch of `data.loader`, a package beside this one: anything with its `to` and `keep_for`.
Batch = Any


class DeviceBatches:
    """The batches of an iterator, on the device.

    On a GPU the copy of a batch runs beside the kernels of the batch before it. Its pinned memory
    is used again only after the copy, which torch's allocator watches, and so is its device memory
    after the last kernel that reads it. On a CPU: the batches themselves, none ahead.
    """

    def __init__(self, batches: Iterator[Batch], device: torch.device) -> None:
        self._batches = batches
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ahead: Any = None  # a batch, or the error of taking it

    def __next__(self) -> Batch:
        if self._stream is None:
            return next(self._batches)
        # Usually done already; the first batch, and any after a slow one, is fetched here.
        self.prefetch()
        batch = self._ahead
        self._ahead = None

        if isinstance(batch, Exception):
            raise batch
        # The kernels of this stream must wait for the copy, but this thread need not.
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        batch.keep_for(current)  # its memory belongs to the other stream
        return batch

    def prefetch(self) -> None:
        """On a GPU take the next batch and start its copy, unless that is done.

        To be called when the kernels of a step are launched: what then waits for the loader does
        not stop the device. The end of the batches, or an error, is raised by the next `next`.
        """
        if self._stream is None or self._ahead is not None:
            return
        try:
            batch = next(self._batches)
            with torch.cuda.stream(self._stream):
                self._ahead = batch.to(self._device)
        except Exception as error:
            # Kept for the next call: the step in progress is not at fault.
            self._ahead = error


class Normalization:
    """Pixels 0..255 to (x / 255 - mean) / std, as one multiply-add on the device."""

    def __init__(
        self, *, mean: tuple[float, ...], std: tuple[float, ...], device: torch.device
    ) -> None:
        # (x / 255 - m) / s = x * (1 / (255 s)) - m / s, with one scale and shift for each channel.
        scale = [1 / (255 * s) for s in std]
        shift = [-m / s for m, s in zip(mean, std, strict=True)]
        self._scale_3HW = torch.tensor(scale, device=device).view(3, 1, 1)
        self._shift_3HW = torch.tensor(shift, device=device).view(3, 1, 1)

    def __call__(
        self, images_B3SS: torch.Tensor, *, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """uint8 or float 0..255; computed in fp32."""
        return torch.addcmul(self._shift_3HW, images_B3SS.float(), self._scale_3HW).to(
            dtype
        )
