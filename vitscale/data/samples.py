"""Read, crop and augment single samples of training; substitute unreadable ones.

Crop, flip and augmentation depend on (seed, epoch, sample, repeat, number of the crop) alone, so
the pixels are the same for any number of ranks and workers. Leaves out: the images of evaluations
(`evaluation.samples`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch

from vitscale.config.errors import UserError
from vitscale.data.index import SplitIndex, sample_names
from vitscale.data.order import Draw
from vitscale.data.remote import prefetch
from vitscale.data.settings import DataSettings
from vitscale.data.training_set import TrainingSet
from vitscale.data.webdataset import tar_samples
from vitscale.distributed.random_numbers import CounterRandom, stream_key
from vitscale.images import crops
from vitscale.images.augment import augment
from vitscale.images.settings import AugmentSettings

# Tried in place of an unreadable sample before the run ends.
MAX_SUBSTITUTES = 8
# One in so many local samples is compared with its hash. All of them would cost 2 % of a decode.
VERIFY_EVERY = 16
NOTHING = AugmentSettings()
# Values of `data.crop` that draw a box of random area and aspect.
CROPS = {"inception": crops.random_crop_box, "inception_tf": crops.tf_crop_box}


class Unreadable(NamedTuple):
    """A sample that could not be read or decoded."""

    part: int
    """Which set of shards."""
    sample: int
    """Its number in that set, by which the trainer looks up the key."""
    shard: str
    error: str
    key: str | None = None
    """Its key, without an index to look it up in."""


class Samples:
    """Fills one image into a row of a batch."""

    shape: tuple[int, ...]
    """Of what `fill` writes: 3, rows, columns, or the pixels of several views in a row."""

    def start(self, *, worker: int, num_workers: int) -> None:
        """Called once in the process that reads, before it reads."""

    def prefetch(self, positions: Sequence[int]) -> None:
        """Called with the positions of a batch, before they are filled."""

    def fill(self, position: int, out: torch.Tensor) -> tuple[int, list[Unreadable]]:
        """Write an image into `out`, uint8 of `shape`; returns its label, and the samples that were
        unreadable."""
        raise NotImplementedError


def unreadable_sample(
    index: SplitIndex, sample: int, error: Exception, *, part: int = 0
) -> Unreadable:
    """The record of a sample of an index that gave this error."""
    return Unreadable(
        part, sample, str(index.tar(index.shard_of(sample))), reason_of(error)
    )


def reason_of(error: Exception) -> str:
    """The text of an error without addresses, which Pillow's have: equal damage, equal texts."""
    return re.sub(
        r" <.* at 0x[0-9a-f]+>", "", getattr(error, "strerror", None) or str(error)
    )


def unreadable_error(
    index: SplitIndex, unreadable: Unreadable, *, more: str = "", next_step: str
) -> UserError:
    """The error that ends a run because of this sample."""
    (name,) = sample_names([index], [(0, unreadable.sample)])
    what = f"sample {name} cannot be read ({unreadable.error}){more}"
    return UserError(what, where=unreadable.shard, next_step=next_step)


class Augmentation:
    """Crop, flip and augment images of training."""

    def __init__(self, settings: DataSettings, *, image_size: int, seed: int) -> None:
        self.seed = seed
        self.decoder = crops.DECODERS[crops.resolve_decoder(settings.decoder)]()

        self.views = view_shapes(settings, image_size)
        self.shape: tuple[int, ...] = (3, image_size, image_size)
        """Of what `write` fills: with several views, the pixels of all of them in a row."""
        if settings.views:
            self.shape = (sum(map(math.prod, self.views.values())),)
        # The settings of each crop, with the keys of its view.
        self.crops: list[DataSettings] = []
        for view in settings.all_views:
            self.crops += [settings.of_view(view)] * view.count
        # Found once, since comparing settings takes a microsecond for each crop.
        self.augmented = [
            number
            for number, settings in enumerate(self.crops)
            if settings.augment != NOTHING
        ]

    def write(
        self, data: bytes, draw: Draw, out: torch.Tensor, *, entry_points: bytes = b""
    ) -> None:
        """Write the image into `out`, uint8 of `shape`. Raises OSError or ValueError."""
        # The common case first: splitting takes as long as a hundredth of a decode.
        outs = [out]
        if out.ndim == 1:
            views = split_views(out, self.views).values()
            outs = [pixels for view in views for pixels in view]
        size = self.decoder.size(data)

        # All boxes are drawn first: one decode gives them all.
        drawn = []
        for number, settings in enumerate(self.crops):
            random = CounterRandom(augmentation_key(self.seed, draw, number))
            side = outs[number].shape[-1]
            drawn.append(_drawn(settings, size, side, random, entry_points))
        self.decoder.crops(data, [request for request, _, _ in drawn], outs)

        for number, (_, right, down) in enumerate(drawn):
            if right or down:
                shifted = crops.reflected(outs[number], right=right, down=down)
                outs[number].copy_(shifted)
        for number in self.augmented:
            settings = self.crops[number]
            # A separate stream, so that augmentation does not change crop and flip.
            key = augmentation_key(self.seed, draw, number, purpose="augment2")
            changed = augment(
                outs[number],
                settings.augment,
                CounterRandom(key),
                settings.mean,
                settings.std,
            )
            outs[number].copy_(changed)


def _drawn(
    settings: DataSettings,
    size: tuple[int, int],
    side: int,
    random: CounterRandom,
    entry_points: bytes,
) -> tuple[crops.CropRequest, int, int]:
    """Draw a box of an image of this width and height, and whether it is mirrored.

    Returns the shifts for `crops.reflected`, too.
    """
    right = down = 0
    if settings.crop == "plain":
        box, right, down = crops.plain_crop_box(*size, size=side, random=random)
    elif settings.crop == "squash":
        box = crops.squash_crop_box(*size, share=settings.crop_share, random=random)
    else:
        box = CROPS[settings.crop](
            *size,
            area=settings.crop_area,
            aspect=settings.crop_aspect,
            random=random,
        )

    flip = settings.horizontal_flip and random.uniform() < 0.5
    request = crops.CropRequest(
        box=box,
        size=side,
        interpolation=settings.interpolation,
        antialias=settings.antialias,
        flip=flip,
        entry_points=entry_points,
    )
    # The image is mirrored before it is shifted, so a shift to the right becomes one to the left.
    return request, -right if flip else right, down


def view_shapes(settings: DataSettings, image_size: int) -> dict[str, tuple[int, ...]]:
    """[count, 3, side, side] of each view of an image, in their order."""
    shapes: dict[str, tuple[int, ...]] = {}
    for view in settings.all_views:
        side = view.image_size or image_size
        shapes[view.name] = (view.count, 3, side, side)
    return shapes


def split_views(
    pixels: torch.Tensor, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, torch.Tensor]:
    """Views, [..., count, 3, side, side] each, of all their pixels [..., N], without a copy."""
    parts = pixels.split([math.prod(shape) for shape in shapes.values()], dim=-1)
    return {
        name: part.unflatten(-1, shape)
        for part, (name, shape) in zip(parts, shapes.items(), strict=True)
    }


class TrainingSamples(Samples):
    """Augmented training samples, by position in training."""

    def __init__(self, training_set: TrainingSet, augmentation: Augmentation) -> None:
        assert training_set.order is not None
        self.parts = training_set.parts
        self.order = training_set.order
        self.targets = training_set.targets
        self.augmentation = augmentation
        self.shape = augmentation.shape
        self.num_pixels = math.prod(self.shape)
        if self.targets is not None:
            # What teachers say of an image travels behind its pixels.
            self.shape = (self.num_pixels + self.targets.header.content_bytes,)

    def prefetch(self, positions: Sequence[int]) -> None:
        """Fetch remote shards of this block of the order and the next in the background."""
        if not any(part.is_remote for part in self.parts):
            return
        ahead = []
        for part, draw in {
            draw.part: draw for draw in map(self.order.at, positions)
        }.items():
            index = self.parts[part]
            shard = index.shard_of(draw.sample)
            numbers = self.order.parts[part].shards_ahead(epoch=draw.epoch, shard=shard)
            for number in numbers:
                ahead.append(index.tar(number))
                if self.targets is not None:
                    ahead.append(self.targets.file(part, draw.epoch, number))
        prefetch(ahead)

    def draw_at(self, position: int) -> Draw:
        """What is read at a position; with targets, epochs repeat the views that have some."""
        draw = self.order.at(position)
        if self.targets is not None:
            draw = draw._replace(epoch=draw.epoch % self.targets.header.views)
        return draw

    def fill(self, position: int, out: torch.Tensor) -> tuple[int, list[Unreadable]]:
        """Write an image, or another one of the same set that substitutes it.

        Raises UserError if no substitute can be read either, or if the storage cannot be accessed:
        outages are transient, and substituting would make runs non-deterministic.
        """
        draw = self.draw_at(position)
        index = self.parts[draw.part]
        unreadable: list[Unreadable] = []
        if self.targets is not None:
            # Of a substitute, teachers have said it in the same place.
            shard = index.shard_of(draw.sample)
            row = draw.sample - self.order.parts[draw.part].samples_of(shard).start
            file = self.targets.file(draw.part, draw.epoch, shard)
            stored = np.frombuffer(self.targets.read(file, row), np.uint8)
            out[self.num_pixels :].numpy()[:] = stored
            out = out[: self.num_pixels].view(self.augmentation.shape)

        for attempt in range(MAX_SUBSTITUTES + 1):
            sample = draw.sample
            if attempt:
                # The same one on every layout and after every resume.
                key = ("substitute", self.augmentation.seed, *draw[:3], attempt)
                sample = stream_key(*key) % index.num_samples
            try:
                place = index.locate(sample)
                data = index.read(place, verify=position % VERIFY_EVERY == 0)
                entry_points = index.entry_points_of(place)
                self.augmentation.write(data, draw, out, entry_points=entry_points)
                return place.label, unreadable
            except UserError:
                # With a substitute for an outage, runs would not be deterministic.
                raise
            except (OSError, ValueError) as error:
                unreadable.append(
                    unreadable_sample(index, sample, error, part=draw.part)
                )
        raise unreadable_error(
            index,
            unreadable[0],
            more=f", nor can {MAX_SUBSTITUTES} substitutes",
            next_step="check the storage; vitscale prepare verify names every damaged shard",
        )


class StreamedSamples(Samples):
    """Augmented training samples of one rank, from tars without an index, in no certain order."""

    def __init__(
        self,
        training_set: TrainingSet,
        augmentation: Augmentation,
        *,
        start: int,
        place: tuple[int, int],
    ) -> None:
        """start: position of training where the streams begin. place: rank and world size."""
        self.augmentation = augmentation
        self.shape = augmentation.shape
        self.num_samples = training_set.num_samples
        self.place = place

        self.stream = partial(
            tar_samples,
            training_set.tars,
            num_classes=len(training_set.classes),
            seed=augmentation.seed,
            start=start,
        )

    def start(self, *, worker: int, num_workers: int) -> None:
        rank, world_size = self.place
        self.samples = self.stream(
            process=rank * num_workers + worker, num_processes=world_size * num_workers
        )

    def fill(self, position: int, out: torch.Tensor) -> tuple[int, list[Unreadable]]:
        """Write the next image of this process; its position keys the augmentation.

        Raises UserError if none of several can be decoded, or for a damaged tar or wrong label.
        """
        epoch, number = divmod(position, self.num_samples)
        unreadable: list[Unreadable] = []
        for tar, key, image, label in islice(self.samples, MAX_SUBSTITUTES + 1):
            try:
                self.augmentation.write(image, Draw(0, epoch, number, 0), out)
                return label, unreadable
            except (OSError, ValueError) as error:
                unreadable.append(Unreadable(0, number, tar, reason_of(error), key))
        raise UserError(
            f"{len(unreadable)} samples in a row cannot be read, the last: {unreadable[-1].error}",
            where=unreadable[-1].shard,
            next_step="check data.train_split and the storage",
        )


def augmentation_key(
    seed: int, draw: Draw, number: int = 0, *, purpose: str = "augment"
) -> int:
    """Key of the random numbers for one crop of one sample in one epoch."""
    # The first part, repeat and crop add nothing, so that their random numbers stay as they are.
    further: tuple[int, ...] = ()
    if draw.part or draw.repeat or number:
        further = (draw.part, draw.repeat)
    if number:
        further += (number,)
    return stream_key(purpose, seed, draw.epoch, draw.sample, *further)
