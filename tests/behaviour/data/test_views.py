"""Views of an image: each is a function of its key, whatever the others are, on any layout."""

from itertools import product
from pathlib import Path

import pytest
import torch

from tests.support.corpora.shard_folders import write_shard_folder
from vitscale.data.loader import Batch, start_loader_server, training_batches
from vitscale.data.order import Draw
from vitscale.data.samples import (
    augmentation_key,
    view_shapes,
)
from vitscale.data.settings import DataSettings
from vitscale.data.training_set import open_training_set
from vitscale.distributed.random_numbers import CounterRandom, stream_key
from vitscale.images import crops
from vitscale.images.augment import augment
from vitscale.images.settings import AugmentSettings

SIZE = 16
SEED = 3
# Two sizes, so that the pixels of one view cannot be taken for those of the other.
GLOBAL = {"name": "global", "count": 2, "crop_area": (0.4, 1.0)}
LOCAL = {"name": "local", "count": 3, "image_size": 8, "crop_area": (0.05, 0.4)}
ERASED = {"erasing": {"probability": 1.0}}
VIEWS = (GLOBAL, LOCAL | {"augment": ERASED})


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("views")
    return write_shard_folder(folder / "a", num_per_class=6, num_shards=3)


def settings_of(shards: Path, views=VIEWS, **more) -> DataSettings:
    values = {"path": str(shards), "global_batch": 4, "views": views, **more}
    return DataSettings.model_validate(values)


def batches(settings: DataSettings, *, rank: int = 0, ranks: int = 1) -> list[Batch]:
    """The first two global batches, with their views."""
    loader = training_batches(
        open_training_set(settings, seed=SEED),
        settings=settings,
        image_size=SIZE,
        seed=SEED,
        start=0,
        stop=8,
        rank=rank,
        world_size=ranks,
        micro_batch=4 // ranks,
        pin_memory=False,
    )
    with loader as stored:
        shapes = view_shapes(settings, SIZE)
        return [batch.with_views(shapes) for batch in stored]


def test_each_crop_is_drawn_by_its_number(shards):
    """Written out from docs/loader.md: the key names seed, epoch, sample and the crop's number."""
    settings = settings_of(shards)
    (first, _) = batches(settings)
    training_set = open_training_set(settings, seed=SEED)

    for row in range(4):
        draw = training_set.order.at(row)
        pixels = crops.decode(training_set.parts[0].read(draw.sample))
        height, width, _ = pixels.shape
        for number in range(5):
            # The first crop has the key that the only view of an image has.
            further = (0, 0, number) if number else ()
            place = (SEED, draw.epoch, draw.sample, *further)
            random = CounterRandom(stream_key("augment", *place))
            area = (0.4, 1.0) if number < 2 else (0.05, 0.4)
            box = crops.random_crop_box(
                width, height, area=area, aspect=(3 / 4, 4 / 3), random=random
            )
            request = crops.CropRequest(
                box=box,
                size=SIZE if number < 2 else 8,
                interpolation="bilinear",
                antialias=False,
                flip=random.uniform() < 0.5,
            )
            right = crops.crop_and_resize(pixels, request)
            if number >= 2:
                erasing = AugmentSettings.model_validate(ERASED)
                random = CounterRandom(stream_key("augment2", *place))
                right = augment(right, erasing, random, (0.5,) * 3, (0.5,) * 3)

            name, inside = ("global", number) if number < 2 else ("local", number - 2)
            assert torch.equal(first.views[name][row, inside], right)

    # What reads one image of each sample sees the one that it sees without views.
    assert torch.equal(first.images, first.views["global"][:, 0])


@pytest.mark.distributed
def test_views_do_not_depend_on_the_layout(shards):
    start_loader_server(3)
    whole = batches(settings_of(shards, num_workers=0))
    halves = [
        batches(settings_of(shards, num_workers=3), rank=rank, ranks=2)
        for rank in range(2)
    ]
    for number, batch in enumerate(whole):
        for name, right in batch.views.items():
            ours = torch.cat([half[number].views[name] for half in halves])
            assert torch.equal(ours, right)


def test_each_part_repeat_and_crop_has_a_key_of_its_own():
    """A repeat with the crops of another one would be the same image twice."""
    places = list(product(range(3), range(3), range(3)))
    draws = [(Draw(part, 1, 7, repeat), number) for part, repeat, number in places]
    keys = [augmentation_key(SEED, draw, number) for draw, number in draws]
    assert len(set(keys)) == len(places)


def test_a_view_may_turn_augmentation_off(shards):
    """Given is what the view says, also where that is the default of `data`."""
    plain_local = LOCAL | {"augment": {}}
    mixed = batches(settings_of(shards, views=(GLOBAL, plain_local), augment=ERASED))
    without = batches(settings_of(shards, views=(GLOBAL, LOCAL)))
    for one, other in zip(mixed, without, strict=True):
        assert torch.equal(one.views["local"], other.views["local"])
        assert not torch.equal(one.views["global"], other.views["global"])


def test_each_view_has_the_augmentation_that_it_names(shards):
    """DINOv2's two global views differ in nothing else. One that names none has that of `data`."""
    grey = {"name": "grey", "augment": {"grayscale": {"probability": 1.0}}}
    inverted = {"name": "inverted", "augment": {"solarize": {"probability": 1.0}}}
    views = (grey, inverted, {"name": "other"})
    mixed = batches(settings_of(shards, views=views, augment=ERASED))
    plain = [view | {"augment": {}} for view in views]
    without = batches(settings_of(shards, views=plain))

    for one, other in zip(mixed, without, strict=True):
        channels = one.views["grey"]
        assert torch.equal(channels, channels.flip(2))
        assert not torch.equal(channels, other.views["grey"])

        before = other.views["inverted"]
        expected = torch.where(before < 128, before, 255 - before)
        assert torch.equal(one.views["inverted"], expected)

        # A box of the mean colour, half of 255, and all else as before.
        differs = one.views["other"] != other.views["other"]
        assert one.views["other"][differs].unique() == 128
