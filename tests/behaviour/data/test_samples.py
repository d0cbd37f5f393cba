"""Which read errors are substituted, and which end the run."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.corpora.shard_folders import write_shard_folder
from tests.support.engine.subjects import WORLD
from tests.support.range_server import served
from tests.support.tables import every, refused
from vitscale.config.errors import StorageError
from vitscale.data.index import SplitIndex, read_split
from vitscale.data.samples import (
    Augmentation,
    Samples,
    StreamedSamples,
    TrainingSamples,
    augmentation_key,
)
from vitscale.data.settings import DataSettings
from vitscale.data.training_set import open_training_set
from vitscale.distributed import atomic_files
from vitscale.distributed.random_numbers import CounterRandom
from vitscale.evaluation.samples import EvaluationSamples, evaluation_batches
from vitscale.images import crops

SIZE = 16
# Written over by every read; a test that compares keeps a copy.
OUT = torch.empty(3, SIZE, SIZE, dtype=torch.uint8)


@pytest.fixture
def shards(tmp_path) -> Path:
    return write_shard_folder(tmp_path / "shards", num_per_class=6, num_shards=3)


def training(shards: Path | str, **changes) -> TrainingSamples:
    data = DataSettings(
        path=str(shards),
        global_batch=4,
        **changes,
    )
    augmentation = Augmentation(data, image_size=SIZE, seed=0)
    training_set = open_training_set(data, seed=0)
    (index,) = training_set.parts
    know_places(index)
    return TrainingSamples(training_set, augmentation)


def know_places(index: SplitIndex):
    """Read where the samples are, so that all later reads are of images."""
    for sample in range(index.num_samples):
        index.locate(sample)


def evaluation(shards: Path, **changes) -> EvaluationSamples:
    data = DataSettings(
        path=str(shards),
        global_batch=4,
        **changes,
    )
    index = read_split(shards, split="train")
    know_places(index)
    return EvaluationSamples(index, settings=data, image_size=SIZE)


# ---- storage that fails -------------------------------------------------------------------------

PASSING_ERRORS = ("ESTALE", "ETIMEDOUT", "ESHUTDOWN", "EAGAIN")


@pytest.fixture
def no_pauses(monkeypatch):
    # As many attempts as in production, without the time between them.
    pauses = [0.0 for _ in atomic_files.READ_PAUSES_S]
    monkeypatch.setattr(atomic_files, "READ_PAUSES_S", pauses)
    monkeypatch.setattr(atomic_files, "PAUSES_S", (0.0,) * 3)


@contextmanager
def failing(name: str, times: int = 1) -> Iterator[list[int]]:
    """Make the next reads of a range fail with this error; yields the calls of `os.pread`."""
    real = os.pread
    calls = []

    def pread(file, num_bytes, offset):
        calls.append(file)
        if len(calls) <= times:
            number = getattr(errno, name)
            raise OSError(number, os.strerror(number))
        return real(file, num_bytes, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pread", pread)
        yield calls


def streamed(folder: Path) -> StreamedSamples:
    values = {
        "path": str(folder),
        "global_batch": 4,
        "val_split": None,
        "reader": "webdataset",
        "webdataset": {"num_samples": 12, "num_classes": 2},
    }
    data = DataSettings.model_validate(values)
    augmentation = Augmentation(data, image_size=SIZE, seed=0)
    opened = open_training_set(data, seed=0)
    samples = StreamedSamples(opened, augmentation, start=0, place=(0, 1))
    samples.start(worker=0, num_workers=1)
    return samples


def cached(folder: Path, cache: Path) -> TrainingSamples:
    """The same shards at a URL, with all tars in the cache."""
    with served(folder) as server:
        remote = {"cache_path": str(cache), "cache_gib": 1.0}
        samples = training(server.url, remote=remote)

        # Read in full now, so that a later failure is one of the local disk.
        (index,) = samples.parts
        for shard in range(index.entry.num_tars):
            index.tar(shard).path()
    return samples


# All ways in which bytes reach a sample.
READERS = ("training", "evaluation", "streamed", "cached")


def reader(name: str, shards: Path, tmp_path) -> Samples:
    if name == "cached":
        return cached(shards, tmp_path / "cache")
    if name == "streamed":
        return streamed(shards)
    make = training if name == "training" else evaluation
    return make(shards)


@pytest.mark.parametrize(
    ("kind", "error", "times"),
    [
        # All errors with one reader, and two with all: each reader has its own place of retrying.
        *product(["training"], PASSING_ERRORS, [1]),
        *product(READERS, ["EIO"], [1, 9]),
        *product(READERS[1:], ["ESTALE"], [1]),
    ],
)
def test_a_passing_error_of_storage_changes_nothing(
    shards, tmp_path, no_pauses, kind, error, times
):
    """The same sample is read again: none is replaced, and the run goes on."""

    # Read without a failure from the same bytes.
    expected = torch.empty_like(OUT)
    label, _ = reader(kind, shards, tmp_path / "undisturbed").fill(1, expected)

    samples = reader(kind, shards, tmp_path)
    with failing(error, times) as calls:
        assert samples.fill(1, OUT) == (label, [])
    assert len(calls) > times
    assert OUT.equal(expected)


@every(error="ESTALE, EIO", kind=READERS)
def test_storage_that_stays_away_ends_the_run_and_is_named(
    shards, tmp_path, no_pauses, capsys, kind, error
):
    """No other sample is taken, which would be another at each start."""
    text = os.strerror(getattr(errno, error))
    samples = reader(kind, shards, tmp_path)

    # The code that a job is started again after, and a line while it waited.
    with served(shards), failing(error, 10**6), pytest.raises(StorageError) as caught:
        samples.fill(1, OUT)
    assert caught.match(rf"(?s)\.tar.* cannot be read \({text}\)")
    assert caught.value.kind.exit_code == 74
    assert f"{text}; reading it again" in capsys.readouterr().err


def test_a_stale_handle_is_opened_again(shards, no_pauses):
    """As after another node has replaced the file: every read of the old one fails."""
    samples = training(shards)
    real = os.pread
    samples.fill(0, OUT)
    # Another node writes the same bytes to a new file, and this one still has the old one open.
    stale = {path.stat().st_ino for path in shards.glob("*.tar")}
    for path in shards.glob("*.tar"):
        old = path.rename(f"{path}.old")  # which keeps its number
        shutil.copy(old, path)

    def pread(file, num_bytes, offset):
        if os.fstat(file).st_ino in stale:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(file, num_bytes, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pread", pread)
        for position in range(12):
            _, lost = samples.fill(position, OUT)
            assert lost == []


def test_a_read_that_fails_half_way_is_no_damage(shards, no_pauses):
    """The first half is returned without an error, which only the read of the rest tells."""
    samples = training(shards)
    real = os.pread
    # Taken from the end; the third attempt succeeds.
    errors = ["EIO", "EIO"]

    def pread(file, num_bytes, offset):
        # An image has more than 100 bytes; its second half is asked for again as the rest.
        if num_bytes > 100:
            return real(file, num_bytes // 2, offset)
        if errors:
            number = getattr(errno, errors.pop())
            raise OSError(number, os.strerror(number))
        return real(file, num_bytes, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pread", pread)
        assert samples.fill(0, OUT)[1] == []
        assert not errors


# Checksums of XFS, ext4 and Btrfs, and a RAID without a sound copy: data is lost for good.
@every(error="EBADMSG, EUCLEAN, ENODATA")
def test_bytes_that_the_file_system_finds_damaged_are_substituted_in_training_only(
    shards, error
):
    samples = training(shards)
    with failing(error) as calls:
        _, (lost,) = samples.fill(0, OUT)
        assert lost.error == os.strerror(getattr(errno, error))
        # The damaged one and its substitute.
        assert len(calls) == 2

    # A result of evaluation with other images would not be that of the set.
    evaluated = evaluation(shards)
    with failing(error), refused("'train-00003' cannot be read"):
        evaluated.fill(3, OUT)

    # Where the samples are is not known without this file, so nothing can substitute it.
    index = read_split(shards, split="train")
    with (
        failing(error),
        refused("records of the samples of train-000000.tar are damaged"),
    ):
        index.locate(0)


# No permission, no memory, no descriptors: another sample would fail for the same reason.
@every(error="EACCES, ENOMEM, EMFILE")
def test_an_error_of_the_machine_ends_the_run_at_once(shards, error):
    for samples in (training(shards), evaluation(shards)):
        message = r"^[^']*\.tar: cannot be re"
        with failing(error) as calls, refused(message):
            samples.fill(0, OUT)
        assert len(calls) == 1

        # The descriptor was not spoiled by it.
        _, lost = samples.fill(0, OUT)
        assert lost == []


@every(error=PASSING_ERRORS)
def test_places_are_read_again_where_storage_fails_for_a_moment(
    shards, no_pauses, error
):
    expected = [read_split(shards, split="train").locate(n) for n in range(12)]
    index = read_split(shards, split="train")
    with failing(error) as calls:
        assert [index.locate(sample) for sample in range(12)] == expected

    # Three tars, of which one was read twice.
    assert len(calls) == 4

    # For longer it is a failure of storage, which names the file.
    index = read_split(shards, split="train")
    with failing(error, 10**6), pytest.raises(StorageError, match="positions-train"):
        index.locate(3)


def test_damage_that_decodes_is_found_in_every_16th_sample(shards):
    samples = training(shards)
    index = samples.parts[0]
    for sample in range(index.num_samples):
        place = index.locate(sample)
        end = place.offset + place.length
        data = bytearray(place.tar.read_bytes())
        if data[end - 2 : end] == b"\xff\xd9":
            data[end - 3] ^= 1  # the last coefficients
        place.tar.write_bytes(data)

    # Every decoder accepts such images, so most are trained on as they are ...
    for position in range(1, 16):
        _, lost = samples.fill(position, OUT)
        assert lost == []

    # ... and the hash of one in 16 tells that something is wrong.
    for position in (0, 16):
        with refused("do not have the hash in the index.*8 substitutes"):
            samples.fill(position, OUT)


@every(fraction="null, 0.8")
def test_evaluation_averages_areas_where_its_settings_say(shards, fraction):
    """Bilinear and bicubic as the libraries: test_pixels, test_exporting."""
    pixels = crops.decode(evaluation(shards).index.read(2))
    more = {}
    resized = (SIZE, SIZE)
    if fraction is not None:
        more = {"eval_resize": "center_crop", "eval_crop_fraction": fraction}

        # The short side becomes 16 / 0.8 = 20 pixels.
        sides = pixels.shape[:2]
        resized = tuple(round(side * 20 / min(sides)) for side in sides)

    evaluation(shards, eval_interpolation="area", **more).fill(2, OUT)
    expected = crops.area_resized(pixels, resized=resized, size=SIZE)
    assert torch.equal(OUT, expected)


def test_inception_tf_takes_boxes_of_its_own(shards):
    """All else equal, the pixels are those of the box that the sample's key draws."""
    area = (0.05, 1.0)
    aspect = (0.75, 1.33)
    samples = training(shards, crop="inception_tf", crop_aspect=aspect)
    for position in range(4):
        samples.fill(position, OUT)
        draw = samples.order.at(position)
        pixels = crops.decode(samples.parts[0].read(draw.sample))
        height, width, _ = pixels.shape

        # The box is drawn first, then the flip, from one stream of the sample.
        random = CounterRandom(augmentation_key(0, draw))
        box = crops.tf_crop_box(
            width,
            height,
            area=area,
            aspect=aspect,
            random=random,
        )
        request = crops.CropRequest(
            box=box,
            size=SIZE,
            interpolation="bilinear",
            antialias=False,
            flip=random.uniform() < 0.5,
        )
        assert torch.equal(OUT, crops.crop_and_resize(pixels, request))


def test_each_sample_is_evaluated_once_and_padding_has_no_weight(shards):
    index = read_split(shards, split="train")
    data = DataSettings(
        path=str(shards),
        global_batch=4,
        num_workers=0,
    )
    # Seven of twelve, on two ranks in threes: the last batch of the second is padded.
    chosen = np.arange(1, 8)
    evaluated = []
    for rank in range(2):
        for batch in evaluation_batches(
            index,
            settings=data,
            image_size=SIZE,
            micro_batch=3,
            world=replace(WORLD, rank=rank, world_size=2),
            samples=chosen,
        ):
            assert set(batch.weights.tolist()) <= {0.0, 1.0}
            is_counted = batch.weights.numpy() == 1
            evaluated += batch.positions[is_counted].tolist()
    assert sorted(evaluated) == chosen.tolist()
