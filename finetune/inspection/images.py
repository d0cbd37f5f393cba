"""Take a few evenly spaced images of files or shards. Unreadable ones are skipped and counted.

Leaves out: finding and reading images (`inference.prediction.inputs`), and which ones a command
means (`subject`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from finetune.inference.prediction.inputs import Files, Shards
from vitscale.config.errors import UserError
from vitscale.data.settings import DataSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageBatch:
    """Images as the model's input."""

    pixels_B3SS: torch.Tensor
    """uint8, on the CPU."""
    numbers: tuple[int, ...]
    """Their numbers among all images."""
    titles: tuple[str, ...]
    """Class, or the folder of a file in a sub-folder; else file name or number."""

    def __len__(self) -> int:
        return len(self.numbers)


class ImageReader:
    """Reads images, resized as the model expects them; counts those it skips."""

    def __init__(
        self,
        inputs: Files | Shards,
        *,
        settings: DataSettings,
        image_size: int,
        roots: Sequence[str] = (),
    ) -> None:
        """roots: folders whose sub-folders are classes."""
        self.inputs = inputs
        self.skipped: dict[int, str] = {}
        """Number of each unreadable image -> where it is, and the error."""
        self._samples = inputs.samples(settings, image_size=image_size)
        self._roots = {Path(root).absolute() for root in roots}

    def spaced(self, count: int, *, batch: int) -> Iterator[ImageBatch]:
        """At most `count` readable images, evenly spaced, in batches of at most `batch`.

        An unreadable image is replaced by the next readable one before the next place.
        """
        total = self.inputs.num_images
        count = min(count, total)
        places = [place * total // count for place in range(count + 1)]
        pixels = self._empty(min(batch, count))
        taken: list[tuple[int, int]] = []
        for first, end in zip(places, places[1:], strict=False):
            self._samples.prefetch([first])
            for number in range(first, end):
                label = self._fill(number, pixels[len(taken)])
                if label is not None:
                    taken.append((number, label))
                    break
            if len(taken) == len(pixels):
                yield self._batch(pixels, taken)
                taken = []
        if taken:
            yield self._batch(pixels, taken)

    def sheet(self, count: int) -> ImageBatch:
        """`spaced` in one batch. Raises UserError if none can be read."""
        for batch in self.spaced(count, batch=count):
            return batch
        where, error = next(iter(self.skipped.values())).rsplit(": ", 1)
        raise UserError(
            f"no image can be read; the first: {error}",
            where=where,
            next_step="choose other images with images=",
        )

    def _empty(self, count: int) -> torch.Tensor:
        size = self._samples.image_size
        return torch.empty(count, 3, size, size, dtype=torch.uint8)

    def _fill(self, number: int, out_3SS: torch.Tensor) -> int | None:
        """The label; None if the image cannot be read."""
        label, unreadable = self._samples.fill(number, out_3SS)
        for each in unreadable:
            (name,) = self.inputs.names([number])
            where = name if name == each.shard else f"{name} in {each.shard}"
            self.skipped[number] = f"{where}: {each.error}"
        return None if unreadable else label

    def _batch(self, pixels: torch.Tensor, taken: Sequence[tuple[int, int]]) -> ImageBatch:
        return ImageBatch(
            pixels_B3SS=pixels[: len(taken)].clone(),
            numbers=tuple(number for number, _ in taken),
            titles=tuple(self._title(number, label) for number, label in taken),
        )

    def _title(self, number: int, label: int) -> str:
        if isinstance(self.inputs, Shards):
            return self.inputs.label_name(label) or f"{self.inputs.index.split} {number}"
        folder = Path(os.fsdecode(self.inputs.paths[number])).absolute().parent
        is_class = self._roots & {*folder.parents}
        return folder.name if is_class else Path(self.inputs.names([number])[0]).stem
