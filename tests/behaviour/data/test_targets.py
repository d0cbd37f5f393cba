"""Targets, written here as docs/data_format.md says: each image gets its own, or is refused."""

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3

from tests.support.corpora.shard_folders import write_shard_folder
from tests.support.range_server import served
from tests.support.tables import every, refused, rows
from vitscale.config.errors import RankError
from vitscale.data.loader import Batch, start_loader_server, training_batches
from vitscale.data.order import ORDER_VERSION
from vitscale.data.settings import DataSettings
from vitscale.data.target_rows import encoded
from vitscale.data.training_set import TrainingSet, open_training_set, with_targets

# An odd number of pixels, so that nothing behind them is aligned by luck.
SIZE = 15
SEED = 3
NUM_VIEWS = 3
# Widths of two teachers; the second one has 2 x 1 patches beside the class token.
TEACHERS = [
    {"fingerprint": "a" * 64, "width": 5, "grid": None},
    {"fingerprint": "b" * 64, "width": 3, "grid": [2, 1]},
]
NUM_VECTORS = (1, 3)
CROP = {"crop_area": (0.2, 1.0)}


def vectors_of(part: int, view: int, sample: int, teacher: int) -> np.ndarray:
    """What a teacher says of a view: different for each. float32 [vectors, width]"""
    place = [part, view, sample, teacher]
    width = TEACHERS[teacher]["width"]
    random = np.random.default_rng(place)
    values = random.standard_normal((NUM_VECTORS[teacher], width))
    # Vectors of different lengths, each of which int8 scales by itself.
    values *= 10.0 ** np.arange(NUM_VECTORS[teacher])[:, None]
    return values.astype("<f4")


def as_bytes(vectors: np.ndarray, precision: str) -> bytes:
    """The layout of docs/data_format.md."""
    if precision == "fp32":
        return vectors.tobytes()
    if precision == "bf16":
        # The upper half of an fp32 number, rounded to the nearest, ties to even.
        bits = vectors.view("<u4")
        bits = bits + 0x7FFF + ((bits >> 16) & 1)
        return (bits >> 16).astype("<u2").tobytes()
    scales = np.abs(vectors).max(axis=1, keepdims=True) / np.float32(127)
    return scales.tobytes() + np.rint(vectors / scales).astype("i1").tobytes()


def write_targets(
    folder: Path, training_set: TrainingSet, precision: str, teachers=(0, 1), **images
) -> Path:
    """A whole folder. images: values of the header that are not those of the tests."""
    files = {}
    for part, index in enumerate(training_set.parts):
        for view in range(NUM_VIEWS):
            sample = 0
            for shard, length in enumerate(index.shard_lengths):
                content = b""
                for _ in range(length):
                    row = b""
                    for teacher in teachers:
                        vectors = vectors_of(part, view, sample, teacher)
                        row += as_bytes(vectors, precision)
                    content += row + blake3(row).digest()[:8]
                    sample += 1
                name = f"view-{view}/{part}-{shard:06d}.bin"
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
                files[name] = blake3(content).hexdigest()

    header = {
        "format_version": 1,
        "teachers": [TEACHERS[teacher] for teacher in teachers],
        "precision": precision,
        "views": NUM_VIEWS,
        "files": files,
        "images": {
            "crop": "inception",
            "crop_area": [0.2, 1.0],
            "crop_aspect": [3 / 4, 4 / 3],
            "crop_share": 1.0,
            "horizontal_flip": True,
            "interpolation": "bilinear",
            "antialias": False,
            "augment": DataSettings(path="", global_batch=1).augment.model_dump(),
            "mean": [0.5, 0.5, 0.5],
            "std": [0.5, 0.5, 0.5],
            "image_size": SIZE,
            "seed": SEED,
            "order_version": ORDER_VERSION,
            "shards": [part.fingerprint for part in training_set.parts],
        }
        | images,
    }
    (folder / "targets.json").write_text(json.dumps(header))
    return folder


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    """14 samples in tars of 5, 5 and 4."""
    folder = tmp_path_factory.mktemp("targets") / "shards"
    return write_shard_folder(folder, num_per_class=7, num_shards=3)


@pytest.fixture(scope="module")
def more_shards(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("targets") / "more"
    return write_shard_folder(folder, num_per_class=4, num_shards=2, seed=1)


def settings_of(path: Path | str, **more) -> DataSettings:
    values = {"path": str(path), "global_batch": 4, "num_workers": 0, **CROP, **more}
    return DataSettings.model_validate(values)


def opened(settings: DataSettings, folder: Path | str, **more) -> TrainingSet:
    views = {"image_size": SIZE, "seed": SEED, **more}
    training_set = open_training_set(settings, seed=SEED)
    return with_targets(training_set, str(folder), settings, **views)


def batches(
    settings: DataSettings,
    training_set: TrainingSet,
    *,
    start: int = 0,
    stop: int,
    rank: int = 0,
    ranks: int = 1,
) -> list[Batch]:
    loader = training_batches(
        training_set,
        settings=settings,
        image_size=SIZE,
        seed=SEED,
        start=start,
        stop=stop,
        rank=rank,
        world_size=ranks,
        micro_batch=4 // ranks,
        pin_memory=False,
    )
    with loader as found:
        targets = training_set.targets
        if targets is None:
            return [*found]
        return [batch.with_targets(targets.header) for batch in found]


@every(precision="fp32, bf16, int8", layout=[(1, 0), (2, 0), (1, 2)])
def test_each_image_has_its_targets(tmp_path, shards, more_shards, precision, layout):
    """Of two sets and two teachers, over more epochs than there are views, on any layout."""
    ranks, workers = layout
    start_loader_server(workers)
    mixture = [{"path": str(more_shards), "share": 0.4}]
    settings = settings_of(shards, mixture=mixture, num_workers=workers)
    training_set = open_training_set(settings, seed=SEED)
    folder = write_targets(tmp_path / "a", training_set, precision)
    stored = opened(settings, folder)
    error = {"fp32": 0, "bf16": 2**-8, "int8": 0.5 / 127}[precision]

    epochs = set()
    for rank in range(ranks):
        found = batches(settings, stored, start=8, stop=80, rank=rank, ranks=ranks)
        size = 4 // ranks
        for number, row in itertools.product(range(len(found)), range(size)):
            position = 8 + number * 4 + rank * size + row
            part, epoch, sample, _ = training_set.order.at(position)
            epochs.add((part, epoch))
            assert found[number].images.shape == (size, 3, SIZE, SIZE)
            first, (class_BD, patches_BLD) = found[number].targets
            assert first[1] is None
            got = [
                first[0][row, None],
                torch.cat([class_BD[row, None], patches_BLD[row]]),
            ]
            for teacher in (0, 1):
                vectors = vectors_of(part, epoch % NUM_VIEWS, sample, teacher)
                largest = np.abs(vectors).max(axis=1, keepdims=True)
                difference = np.abs(got[teacher].numpy() - vectors)
                assert np.all(difference <= error * largest)
    # Else nothing says that views come again.
    assert {(0, 3), (1, 3)} <= epochs


@every(precision="fp32, bf16, int8")
def test_rows_are_those_of_the_format(precision):
    """To the byte, and a vector of zeros has a scale, too."""
    vectors = np.stack([vectors_of(0, 0, sample, 1) for sample in range(6)])
    found = encoded(torch.from_numpy(vectors), precision).numpy()
    assert [row.tobytes() for row in found] == [
        as_bytes(each, precision) for each in vectors
    ]
    assert encoded(torch.zeros(1, 1, 4), precision)[0, -4:].tolist() == [0] * 4


def test_epochs_have_the_pixels_of_their_views(tmp_path, shards):
    """The first ones are those of a training without targets; then the first one comes again."""
    settings = settings_of(shards)
    plain = open_training_set(settings, seed=SEED)
    stored = opened(settings, write_targets(tmp_path / "a", plain, "fp32"))
    without = batches(settings, plain, stop=84)
    found = batches(settings, stored, stop=84)

    seen: dict[tuple[int, int], torch.Tensor] = {}
    num_again = 0
    for number in range(84):
        draw = plain.order.at(number)
        image = found[number // 4].images[number % 4]
        place = (draw.epoch % NUM_VIEWS, draw.sample)
        if draw.epoch < NUM_VIEWS:
            assert torch.equal(image, without[number // 4].images[number % 4])
            seen[place] = image
        else:
            num_again += 1
            assert torch.equal(image, seen[place])
    assert num_again > 20


def test_targets_at_a_url(tmp_path, shards):
    settings = settings_of(shards, remote={"cache_path": str(tmp_path / "cache")})
    training_set = open_training_set(settings, seed=SEED)
    folder = write_targets(tmp_path / "bucket" / "a", training_set, "bf16")
    local = batches(settings, opened(settings, folder), stop=16)

    with served(tmp_path / "bucket") as server:
        remote = opened(settings, f"{server.url}/a")
        # Opening fetches the header alone.
        assert [*server.requests] == ["a/targets.json"]
        for there, here in zip(batches(settings, remote, stop=16), local, strict=True):
            for (class_BD, _), (expected, _) in zip(
                there.targets, here.targets, strict=True
            ):
                assert torch.equal(class_BD, expected)

        # A copy whose bytes are damaged is fetched again.
        fetched = dict(server.requests)
        for path in (tmp_path / "cache").iterdir():
            if path.stat().st_size:
                path.write_bytes(bytes(path.stat().st_size))
        batches(settings, remote, stop=4)
        assert dict(server.requests) != fetched


# ---- what is refused ----------------------------------------------------------------------------


@rows("""
- [settings, views, message]
- [{}, {seed: 4}, "seed: targets 3, this run 4"]
- [{}, {image_size: 16}, "image_size: targets 15, this run 16"]
- [{crop_area: [0.3, 1.0]}, {}, "crop_area"]
- [{crop_aspect: [0.8, 1.25]}, {}, "crop_aspect"]
- [{crop: squash, crop_share: 0.9, crop_area: [0.05, 1.0]}, {}, "crop: .*crop_share"]
- [{interpolation: bicubic}, {}, "interpolation"]
- [{antialias: true}, {}, "antialias"]
- [{mean: [0.4, 0.5, 0.5]}, {}, "mean"]
- [{std: [0.4, 0.5, 0.5]}, {}, "std"]
- [{horizontal_flip: false}, {}, "horizontal_flip"]
- [{augment: {three_augment: true}}, {}, "augment"]
- [{only_classes: [cat]}, {}, "shards"]
- [{first_percent: 50.0}, {}, "shards"]
""")
def test_targets_of_other_images_are_refused(
    tmp_path, shards, settings, views, message
):
    plain = settings_of(shards)
    folder = write_targets(tmp_path / "a", open_training_set(plain, seed=3), "fp32")
    with refused(f"(?s)targets of other images, views or teachers.*{message}"):
        opened(settings_of(shards, **settings), folder, **views)
    opened(plain, folder)


def test_targets_of_another_order_are_refused(tmp_path, shards):
    """Of another version of this program, which drew other crops."""
    settings = settings_of(shards)
    plain = open_training_set(settings, seed=SEED)
    other = ORDER_VERSION + 1
    folder = write_targets(tmp_path / "a", plain, "fp32", order_version=other)
    with refused(f"(?s)other images.*order_version: targets {other}"):
        opened(settings, folder)


def test_all_of_a_header_tells_targets_from_others(tmp_path, shards):
    """What a resumed run is compared by: other files of the same crops are other targets, too."""
    settings = settings_of(shards)
    plain = open_training_set(settings, seed=SEED)
    folder = write_targets(tmp_path / "a", plain, "fp32")
    whole = json.loads((folder / "targets.json").read_text())
    name = "view-0/0-000000.bin"
    others = [
        {"views": NUM_VIEWS - 1},
        {"files": whole["files"] | {name: "0" * 64}},
        {"teachers": [TEACHERS[0], TEACHERS[1] | {"fingerprint": "c" * 64}]},
    ]
    fingerprints = [opened(settings, folder).targets.fingerprint]
    assert opened(settings, folder).targets.fingerprint == fingerprints[0]
    for values in others:
        changed(folder, **whole | values)
        fingerprints.append(opened(settings, folder).targets.fingerprint)
    assert len({*fingerprints}) == 1 + len(others)


def test_a_mixture_needs_the_targets_of_all_sets(tmp_path, shards, more_shards):
    folder = write_targets(
        tmp_path / "a", open_training_set(settings_of(shards), seed=3), "fp32"
    )
    mixture = [{"path": str(more_shards), "share": 0.4}]
    with refused("(?s)other images.*shards"):
        opened(settings_of(shards, mixture=mixture), folder)


def changed(folder: Path, **values) -> None:
    path = folder / "targets.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (shutil.rmtree, "there are no targets.*No such file"),
    "no header": (lambda f: (f / "targets.json").unlink(), "there are no targets"),
    "unfinished": (lambda f: changed(f, files={}), "not complete"),
    "another version": (lambda f: changed(f, format_version=2), "format_version"),
    "another kind": (lambda f: changed(f, precision="fp8"), "precision"),
    "a missing file": (
        lambda f: (f / "view-2/0-000001.bin").unlink(),
        r"(?s)1 of 9 .*view-2/0-000001.bin: missing",
    ),
    "a short file": (
        lambda f: (f / "view-0/0-000002.bin").write_bytes(b"x"),
        "view-0/0-000002.bin: 1 bytes",
    ),
}


@every(kind=DAMAGE)
def test_incomplete_targets_are_refused(tmp_path, shards, kind):
    damage, message = DAMAGE[kind]
    settings = settings_of(shards)
    training_set = open_training_set(settings, seed=SEED)
    folder = write_targets(tmp_path / "a", training_set, "fp32")
    damage(folder)
    with refused(message):
        opened(settings, folder)


@every(bit="0, 3, 100, 300")
def test_a_flipped_bit_is_found_when_it_is_read(tmp_path, shards, bit):
    """In a vector or in a hash, wherever it is: rows have 64 bytes."""
    settings = settings_of(shards)
    folder = write_targets(
        tmp_path / "a", open_training_set(settings, seed=SEED), "fp32"
    )
    path = folder / "view-0/0-000001.bin"
    content = bytearray(path.read_bytes())
    content[bit] ^= 16
    path.write_bytes(content)

    training_set = opened(settings, folder)
    with pytest.raises(RankError, match="row .* of the targets is damaged") as error:
        batches(settings, training_set, stop=16)
    assert error.value.where == str(path)


def test_substitutes_have_the_targets_of_what_they_replace(tmp_path, shards):
    """The teacher has seen the same substitute in the same place."""
    folder = tmp_path / "shards"
    shutil.copytree(shards, folder)
    settings = settings_of(folder)
    training_set = open_training_set(settings, seed=SEED)
    targets = write_targets(tmp_path / "a", training_set, "fp32")
    index = training_set.parts[0]
    draw = training_set.order.at(0)
    tar, start, *_ = index.locate(draw.sample)
    content = bytearray(tar.read_bytes())
    content[start : start + 200] = bytes(200)
    tar.write_bytes(content)

    (batch,) = batches(settings, opened(settings, targets), stop=4)
    assert [each.sample for each in batch.unreadable] == [draw.sample]
    expected = vectors_of(0, 0, draw.sample, 0)
    assert np.array_equal(batch.targets[0][0][0].numpy(), expected[0])
