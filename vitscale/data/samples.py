"""One sample: its bytes, its pixels, and what takes its place when they cannot be had.

Owns: reading, augmenting by the sample's own counters, and substitutes for unreadable samples.
Leaves out: the order (`order`), batches and processes (`loader`).

A sample's bytes, crop, flip and augmentation depend on (seed, epoch, sample, view) alone, so any
number of ranks and workers gives the same pixels.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import torch

from vitscale.config.errors import UserError
from vitscale.data.index import SplitIndex
from vitscale.data.index_keys import sample_names
from vitscale.data.order import Draw
from vitscale.data.remote.shards import RemoteSamples, read_ahead
from vitscale.data.settings import DataSettings
from vitscale.data.shard_files import ShardFiles
from vitscale.data.training_set import TrainingSet
from vitscale.distributed.random_numbers import CounterRandom, stream_key
from vitscale.images import crops
from vitscale.images.augment import augment
from vitscale.images.decoders import DECODERS, resolve_decoder
from vitscale.images.settings import AugmentSettings

# As many neighbours as this are tried before a sample is given up.
SUBSTITUTES = 8


class Unreadable(NamedTuple):
    """A sample that could not be read or decoded."""

    part: int
    """Which set of shards."""
    sample: int
    """Its number there; what it is called is for the trainer to find out, once."""
    shard: str
    error: str


class SplitReader:
    """Samples of one split by number."""

    def __init__(self, index: SplitIndex, *, part: int = 0) -> None:
        self.index, self.part = index, part
        self.files = ShardFiles(index.shard_paths)
        self.remote: RemoteSamples | None = None
        if index.remote is not None:
            assert index.content is not None
            self.remote = RemoteSamples(
                index.remote,
                shard_of=index.shard_of,
                offset=index.offset,
                length=index.length,
                content=index.content,
            )

    def bytes_of(self, sample: int) -> bytes:
        """The image as stored. Raises OSError when its bytes are lost, UserError when the storage
        cannot be reached."""
        if self.remote is not None:
            return self.remote.read(sample)
        index = self.index
        return self.files.read(
            int(index.shard_of[sample]),
            offset=int(index.offset[sample]),
            num_bytes=int(index.length[sample]),
        )

    def label(self, sample: int) -> int:
        return int(self.index.label[sample])

    def unreadable(self, sample: int, error: Exception) -> Unreadable:
        number = self.index.shard_of[sample]
        remote = self.index.remote
        shard = self.files.paths[number] if remote is None else str(remote.urls[number])
        # Pillow's messages hold addresses; the same damage is to read the same everywhere.
        text = re.sub(r" <.* at 0x[0-9a-f]+>", "", str(error))
        return Unreadable(self.part, sample, shard, text)

    def ending(self, lost: Unreadable, *, more: str = "", next_step: str) -> UserError:
        """For a sample without which the run ends."""
        (name,) = sample_names([self.index], [(0, lost.sample)])
        what = f"sample {name} cannot be read ({lost.error}){more}"
        return UserError(what, where=lost.shard, next_step=next_step)


class TrainingSamples:
    """Augmented samples by position in training."""

    def __init__(
        self, training_set: TrainingSet, *, settings: DataSettings, image_size: int, seed: int
    ) -> None:
        self.parts = [
            SplitReader(index, part=part) for part, index in enumerate(training_set.parts)
        ]
        self.order, self.seed = training_set.order, seed
        self.settings, self.image_size = settings, image_size
        self.decoder = DECODERS[resolve_decoder(settings.decoder)]()
        self.augments = settings.augment != AugmentSettings()

    def announce(self, positions: Sequence[int]) -> None:
        """Let samples that lie behind URLs be fetched while others are decoded."""
        if not any(part.remote for part in self.parts):
            return
        draws = [self.order.at(position) for position in positions]
        last = {draw.part: draw for draw in draws}
        samples, shards = [], []
        for number, part in enumerate(self.parts):
            if part.remote is None or number not in last:
                continue
            samples += [(part.remote, draw.sample) for draw in draws if draw.part == number]
            ahead = self.order.parts[number].shards_ahead(
                epoch=last[number].epoch, shard=int(part.index.shard_of[last[number].sample])
            )
            shards += [(part.remote, shard) for shard in ahead]
        read_ahead(samples, shards=shards)

    def fill(self, position: int, out: torch.Tensor) -> tuple[int, list[Unreadable]]:
        """Write the image that stands at `position` into `out`, uint8 [3, S, S].

        Returns its label, and the samples in whose place it stands. Raises UserError when no
        substitute can be read either, or when the storage cannot be reached: a substitute for what
        is there again tomorrow would depend on the day.
        """
        draw = self.order.at(position)
        reader = self.parts[draw.part]
        unreadable: list[Unreadable] = []
        for attempt in range(SUBSTITUTES + 1):
            sample = self._substitute(draw, attempt) if attempt else draw.sample
            try:
                self._augmented(reader.bytes_of(sample), draw, out)
                return reader.label(sample), unreadable
            except UserError:
                raise
            except (OSError, ValueError) as error:
                unreadable.append(reader.unreadable(sample, error))
        raise reader.ending(
            unreadable[0],
            more=f", nor can {SUBSTITUTES} others tried in its place",
            next_step="check the storage; data_prep/verify_shards.py names every damaged shard",
        )

    def _substitute(self, draw: Draw, attempt: int) -> int:
        """Another sample of the same set, the same one on every layout and in every resume."""
        key = stream_key("substitute", self.seed, draw.part, draw.epoch, draw.sample, attempt)
        return key % self.parts[draw.part].index.num_samples

    def _augmented(self, data: bytes, draw: Draw, out: torch.Tensor) -> None:
        settings = self.settings
        random = CounterRandom(augmentation_key(self.seed, draw))
        width, height = self.decoder.size(data)
        right = down = 0
        if settings.crop == "plain":
            box, right, down = crops.plain_crop_box(
                width, height, size=self.image_size, random=random
            )
        else:
            box = crops.random_crop_box(
                width, height, area=settings.crop_area, aspect=settings.crop_aspect, random=random
            )
        flip = settings.horizontal_flip and random.uniform() < 0.5
        request = crops.CropRequest(
            box=box,
            size=self.image_size,
            interpolation=settings.interpolation,
            antialias=settings.antialias,
            flip=flip,
        )
        self.decoder.crop(data, request, out=out)
        if right or down:
            out.copy_(crops.reflected(out, right=-right if flip else right, down=down))
        if self.augments:
            # A stream of its own: crop and flip stay what they are without augmentation.
            random = CounterRandom(augmentation_key(self.seed, draw, purpose="augment2"))
            mean, std = settings.mean, settings.std
            out.copy_(augment(out, settings.augment, random, mean=mean, std=std))


def augmentation_key(seed: int, draw: Draw, *, purpose: str = "augment") -> int:
    """What the augmentation of one sample at one position depends on."""
    further = (draw.part, draw.view) if draw.part or draw.view else ()
    return stream_key(purpose, seed, draw.epoch, draw.sample, *further)


class EvaluationSamples:
    """Samples by stored position, resized without chance."""

    def __init__(self, index: SplitIndex, *, settings: DataSettings, image_size: int) -> None:
        self.reader = SplitReader(index)
        self.settings, self.image_size = settings, image_size
        self.decoder = DECODERS[resolve_decoder(settings.decoder)]()

    def announce(self, samples: Sequence[int]) -> None:
        """Let samples that lie behind a URL be fetched while others are decoded."""
        remote = self.reader.remote
        if remote is not None:
            shards = sorted({int(self.reader.index.shard_of[sample]) for sample in samples})
            read_ahead(
                [(remote, sample) for sample in samples],
                shards=[(remote, shard) for shard in shards],
            )

    def fill(self, sample: int, out: torch.Tensor) -> tuple[int, list[Unreadable]]:
        """Write the image of `sample` into `out`, uint8 [3, S, S]; returns its label.

        Raises UserError when it cannot be read: an accuracy over other images would be another.
        """
        try:
            self._resized(self.reader.bytes_of(sample), out)
        except UserError:
            raise
        except (OSError, ValueError) as error:
            raise self.reader.ending(
                self.reader.unreadable(sample, error),
                next_step="make the shards again: they changed since data preparation",
            ) from None
        return self.reader.label(sample), []

    def _resized(self, data: bytes, out: torch.Tensor) -> None:
        settings = self.settings
        width, height = self.decoder.size(data)
        box = crops.CropBox(0, 0, width, height)
        if settings.eval_resize == "center_crop":
            box = crops.center_crop_box(width, height, fraction=settings.eval_crop_fraction)
        request = crops.CropRequest(
            box=box,
            size=self.image_size,
            interpolation=settings.interpolation,
            antialias=True,
            flip=False,
        )
        self.decoder.crop(data, request, out=out)
