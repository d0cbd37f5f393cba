"""Read the images of an evaluation, resize them, and make batches of them.

Leaves out: workers and their batches (`data.loader`), resampling and decoding (`images.crops`).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np
import torch

from vitscale.config.errors import UserError
from vitscale.data.index import SplitIndex
from vitscale.data.loader import Batch, open_batches
from vitscale.data.remote import prefetch
from vitscale.data.samples import (
    Samples,
    Unreadable,
    unreadable_error,
    unreadable_sample,
)
from vitscale.data.settings import DataSettings
from vitscale.distributed.world import World
from vitscale.images import crops


class EvaluationResize:
    """Make the model's input of an image as stored: the resize and crop of evaluations."""

    def __init__(self, settings: DataSettings, *, image_size: int) -> None:
        self.settings = settings
        self.image_size = image_size
        self.decoder = crops.DECODERS[crops.resolve_decoder(settings.decoder)]()

    def __call__(
        self, data: bytes, out: torch.Tensor, *, pixels_HW3: torch.Tensor | None = None
    ) -> None:
        """Write the image into `out`, uint8 [3, rows, columns]. Raises OSError or ValueError.

        pixels_HW3: uint8, of an image that is decoded already.
        """
        settings = self.settings
        side = self.image_size

        # A mean of areas needs all pixels, so it has a path of its own.
        if settings.eval_interpolation == "area":
            if pixels_HW3 is None:
                pixels_HW3 = self.decoder.whole(data)
            larger = round(side / settings.eval_crop_fraction)
            if settings.eval_resize == "squash":
                resized = (side, side)
            elif settings.eval_resize.startswith("squash_crop"):
                resized = (larger, larger)
            else:
                height, width, _ = pixels_HW3.shape
                factor = larger / min(height, width)
                resized = (round(height * factor), round(width * factor))
            out.copy_(crops.area_resized(pixels_HW3, resized=resized, size=side))
            return

        if pixels_HW3 is None:
            width, height = self.decoder.size(data)
        else:
            height, width, _ = pixels_HW3.shape

        # From here on the box alone is decoded, where the image is not decoded already.
        plan = crops.EVALUATION_CROPS[settings.eval_resize]
        box, resized, (top, left) = plan(
            width, height, size=side, fraction=settings.eval_crop_fraction
        )
        request = crops.CropRequest(
            box=box,
            size=resized,
            interpolation=settings.eval_interpolation or settings.interpolation,
            antialias=settings.eval_antialias,
            flip=False,
        )
        if pixels_HW3 is None:
            image = self.decoder.crop(data, request)
        else:
            image = crops.crop_and_resize(pixels_HW3, request)
        out.copy_(image[:, top : top + side, left : left + side])


class EvaluationSamples(Samples):
    """Evaluation samples, by stored position; resized deterministically."""

    def __init__(
        self,
        index: SplitIndex,
        *,
        settings: DataSettings,
        image_size: int,
        strict: bool = True,
    ) -> None:
        """strict: an unreadable sample is an error; else its image is black, and it is returned."""
        self.index = index
        self.shape = (3, image_size, image_size)
        self.strict = strict
        self.resize = EvaluationResize(settings, image_size=image_size)

    def prefetch(self, samples: Sequence[int]) -> None:
        """Fetch the remote shards of a batch, and the two after them, in the background."""
        # Evaluations read shards in their stored order, so the next ones are known.
        if not self.index.is_remote:
            return
        numbers = [self.index.shard_of(sample) for sample in samples]
        stop = min(max(numbers) + 3, self.index.entry.num_tars)
        prefetch([self.index.tar(number) for number in range(min(numbers), stop)])

    def fill(self, sample: int, out: torch.Tensor) -> tuple[int, list[Unreadable]]:
        """Write an image. There is no substitute, which would change the metric."""
        unreadable = []
        place = self.index.locate(sample)
        try:
            self.resize(self.index.read(place), out)
        except UserError:
            raise
        except (OSError, ValueError) as error:
            unreadable.append(unreadable_sample(self.index, sample, error))
            if self.strict:
                raise unreadable_error(
                    self.index,
                    unreadable[0],
                    next_step="make the shards again: they have changed since data preparation",
                ) from None

            # A fixed content, so that two runs see the same batch.
            out.zero_()
        return place.label, unreadable


def evaluation_batches(
    index: SplitIndex,
    *,
    settings: DataSettings,
    image_size: int,
    micro_batch: int,
    world: World,
    samples: np.ndarray | None = None,
) -> Generator[Batch, None, None]:
    """Every sample once over all ranks, in equally many batches per rank, as ZeRO-3 requires.

    samples: numbers of the samples to take, at least one; None: all.
    The last batches are padded with samples of weight 0.
    """
    chosen = np.arange(index.num_samples) if samples is None else samples
    stride = world.world_size * micro_batch

    # Rounded up, so that every rank makes the same number of forward passes.
    num_batches = -(-len(chosen) // stride)
    places = np.arange(num_batches * stride).reshape(
        num_batches, world.world_size, micro_batch
    )[:, world.rank]
    # Places beyond the end repeat the last sample, with weight 0.
    positions = chosen[np.minimum(places, len(chosen) - 1)]

    reader = EvaluationSamples(index, settings=settings, image_size=image_size)
    with open_batches(
        reader,
        positions.tolist(),
        batch=micro_batch,
        settings=settings,
        pin_memory=world.device.type == "cuda",
    ) as batches:
        # Padding has weight 0 in every metric.
        is_sample = places < len(chosen)
        for batch, counts, numbers in zip(batches, is_sample, positions, strict=True):
            weights = torch.as_tensor(counts, dtype=torch.float32)
            yield Batch(batch.images, batch.labels, weights, positions=numbers)
