"""Indexes and manifests, and the training sets made of them: subsets and mixtures."""

import errno
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import yaml
from blake3 import blake3

from benchmarks.billion import make_index
from benchmarks.billion import opened as synthetic_set
from data_prep.formats import index_files
from data_prep.formats.index_files import (
    shards_of_split,
    write_index,
    write_split,
)
from tests.support.corpora.shard_folders import make_shard_folder, write_shard_folder
from tests.support.tables import every, refused, rows
from vitscale.config.errors import StorageError, UserError
from vitscale.data import index as index_module
from vitscale.data import webdataset
from vitscale.data.index import (
    INDEX_NAME,
    MANIFEST_NAME,
    SplitIndex,
    choose_by_key,
    read_manifest,
    read_split,
    sample_keys,
    sample_names,
)
from vitscale.data.settings import DataSettings, RemoteSettings
from vitscale.data.training_set import (
    TrainingSet,
    _check_cache,
    open_training_set,
    open_val_split,
)
from vitscale.data.webdataset import tar_samples, tars_of_split
from vitscale.distributed import atomic_files
from vitscale.distributed.random_numbers import splitmix


def edit_manifest(folder: Path, **changes):
    """Change some values of a manifest, as a hand or another tool might."""
    path = folder / MANIFEST_NAME
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | changes))


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    """20 samples of 2 classes in 3 tars, and a split `test` of 4 samples stored before them."""
    folder = tmp_path_factory.mktemp("set") / "a"
    lengths = {"test": (2, 2), "train": (7, 7, 6)}
    make_shard_folder(folder, lengths=lengths, classes=("cat", "dog"))
    return folder


@pytest.fixture
def copy(shards, tmp_path) -> Path:
    return shutil.copytree(shards, tmp_path / "copy")


def keys(index: SplitIndex) -> list[str]:
    return sample_keys(index, range(index.num_samples))


# The classes alternate, so that a subset by class is every second sample.
NAMES = [f"train-c{number % 2}-{number}" for number in range(20)]


def rows_of_split(folder: Path, split: str) -> list[dict[str, Any]]:
    """The rows of a split in the order of the table, as pyarrow alone reads them."""
    table = pq.read_table(folder / INDEX_NAME)
    of_split = table.filter(pc.equal(table["split"], split))
    return of_split.to_pylist()


def test_a_split_is_read_without_the_others(shards):
    index = read_split(shards, split="train")
    rows = rows_of_split(shards, "train")

    # The lengths that the fixture asks for: three shards of 7, 7 and 6 samples.
    assert index.shard_lengths.tolist() == [7, 7, 6]

    # Classes are numbered in the order of their names.
    assert index.label.tolist() == [0, 1] * 10
    assert index.classes == ("cat", "dog")

    # The first eight bytes tell whether a sample was damaged.
    assert index.num_samples == len(rows)
    for number, row in enumerate(rows):
        place = index.locate(number)
        assert place.tar == shards / row["shard"]
        assert place.offset == row["offset"]
        assert place.length == row["length"]
        assert place.label == row["label"]
        assert place.hash_prefix == int.from_bytes(row["blake3"][:8], "little")
        assert blake3(index.read(number)).digest() == row["blake3"]
    assert keys(index) == NAMES


@pytest.fixture
def many_groups(tmp_path, monkeypatch) -> Path:
    """41 samples of `train` and 9 of `test`, in row groups of four."""
    monkeypatch.setattr(index_files, "ROW_GROUP_ROWS", 4)
    folder = tmp_path / "set"
    lengths = {"test": (9,), "train": (20, 21)}
    make_shard_folder(folder, lengths=lengths)

    # Each split begins a group of its own, so none holds rows of both.
    assert pq.ParquetFile(folder / INDEX_NAME).num_row_groups == 3 + 11
    return folder


@every(seed=range(4), split="test, train")
def test_keys_of_any_samples_are_those_of_the_table(many_groups, split, seed):
    # pyarrow reads the whole table: the independent answer.
    expected = [row["key"] for row in rows_of_split(many_groups, split)]
    num = len(expected)
    random = np.random.default_rng(seed)
    index = read_split(many_groups, split=split)

    # In any order and with repetitions, as a batch asks for them.
    wanted = random.integers(0, num, 25).tolist()
    keys_of_wanted = [expected[row] for row in wanted]
    assert sample_keys(index, wanted) == keys_of_wanted
    assert sample_keys(index, []) == []

    # A subset keeps its own numbering: its first sample is not the first of the split.
    subset = random.choice(num, 7, replace=False)
    subset.sort()
    names = [expected[row] for row in subset]
    assert keys(index.subset(subset, name="some")) == names

    # A list by hand may name what is gone; two such lines are counted.
    list_path = many_groups / "keys"
    listing = listed(list_path, [*names, "other", "unknown"])
    chosen = choose_by_key(index, listing)
    assert keys(chosen) == names
    assert "2 lines of data.only_keys name no sample" in chosen.note
    assert "'unknown'" in chosen.note
    listed(list_path, names)
    assert choose_by_key(index, listing).note == ""

    # That other settings leave out a sample does not matter.
    some = index.subset(subset[1:], name="some")
    assert choose_by_key(some, listing).note == ""


def damage_keys(path: Path, row_group: int):
    """Overwrite the keys of a row group on the disk."""
    metadata = pq.ParquetFile(path).metadata
    column = metadata.row_group(row_group).column(0)
    assert column.path_in_schema == "key"

    # A dictionary, where there is one, comes before the values.
    start = column.dictionary_page_offset or column.data_page_offset
    with open(path, "r+b") as file:
        file.seek(start)
        file.write(b"\xff" * column.total_compressed_size)


def test_only_the_row_groups_of_the_samples_are_read(many_groups):
    """So all others may be damaged, and a name costs the same whatever the size of the corpus."""
    index = read_split(many_groups, split="train")
    path = many_groups / INDEX_NAME

    # Samples 0 to 3 and 20 to 23 of `train` stay readable.
    kept = {3, 3 + 5}
    for row_group in {*range(14)} - kept:
        damage_keys(path, row_group)
    first, other = sample_names([index], [(0, 21), (0, 3)])
    assert first == "'train-c0-21'"
    assert other == "'train-c0-3'"


def shortened(path: Path):
    """An index with the first three rows of each split."""
    table = pq.read_table(path)
    splits = []
    for name in ("test", "train"):
        of_split = rows_of_split(path.parent, name)[:3]
        splits.append(pa.Table.from_pylist(of_split, table.schema))
    write_index(path.parent, tables=splits)


def rewrite(path: Path, *, columns: list[str] | None = None, **options):
    """Store some columns of an index again."""
    table = pq.read_table(path, columns=columns)
    pq.write_table(table, path, **options)


@pytest.mark.parametrize(
    "change",
    [
        # The file itself: other bytes, none, damage in the middle, or no file.
        lambda path: path.write_bytes(b"damaged"),
        lambda path: path.write_bytes(b""),
        lambda path: damage_keys(path, 1),
        lambda path: path.unlink(),
        # A sound Parquet file that lacks what a key is found by.
        lambda path: rewrite(path, columns=["split"]),
        lambda path: rewrite(path, columns=["key"]),
        lambda path: rewrite(path, write_statistics=False),
        # Fewer rows than the index had when the run began.
        shortened,
    ],
    ids=[
        "damaged",
        "empty",
        "bad block",
        "gone",
        "no keys",
        "no splits",
        "no ranges",
        "shorter",
    ],
)
def test_a_sample_without_a_readable_key_is_named_by_number(copy, change):
    """Whatever happens to the index during a run, a name does not end it."""
    index = read_split(copy, split="train")

    # As long as nothing is wrong, the keys are read.
    names = sample_names([index], [(0, 6), (0, 1)])
    assert names == [repr(NAMES[6]), repr(NAMES[1])]

    # The error message of a sample must not fail for want of its name ...
    change(copy / INDEX_NAME)
    (name,) = sample_names([index], [(0, 6)])
    assert name == "number 6 of 'train'"

    # ... but whoever asks for keys alone is told.
    with pytest.raises(UserError):
        sample_keys(index, [6])


# ---- storage that fails -------------------------------------------------------------------------


@pytest.fixture
def flaky(monkeypatch) -> Callable[[str, int, int], list[str]]:
    """Make reads of files with a name fail so often with an error; returns what they were."""
    monkeypatch.setattr(atomic_files, "READ_PAUSES_S", (0.0,) * 3)

    def start(name, error, times):
        # Shared by all patched functions, so that `times` counts their failures
        # together.
        failed = []

        def failing(real):
            def call(path, *args, **more):
                if str(path).endswith(name) and len(failed) < times:
                    failed.append(str(path))
                    raise OSError(error, os.strerror(error))
                return real(path, *args, **more)

            return call

        # Every call by which indexes, manifests and folders are read.
        for name_of_method in "read_bytes stat is_dir is_file".split():
            real = getattr(Path, name_of_method)
            monkeypatch.setattr(Path, name_of_method, failing(real))
        for module, function in (
            (pq, "read_table"),
            (pq, "ParquetFile"),
            (os, "listdir"),
            (webdataset, "_StoredTar"),
        ):
            real = getattr(module, function)
            monkeypatch.setattr(module, function, failing(real))
        return failed

    return start


def first_key_of_stream(folder: Path) -> str:
    samples = tar_samples(
        [folder / "train-000001.tar"],
        num_classes=0,
        seed=0,
        start=0,
        process=0,
        num_processes=1,
    )
    return next(samples)[1]


# The three ways by which a training set is opened.
READS = {
    "index": lambda folder: keys(read_split(folder, split="train")),
    "listing": lambda folder: tars_of_split(folder, "train", where="data.train_split"),
    "stream": first_key_of_stream,
}


# A split is opened by all of these; `entry_points` is a folder that most sets lack.
@rows("""
- [read, name]
- [index, manifest.json]
- [index, index.parquet]
- [index, positions-train.bin]
- [index, tars-train.arrow]
- [index, train-000001.tar]
- [index, entry_points]
- [listing, copy]
- [stream, train-000001.tar]
""")
@every(
    # A handle of NFS that is stale, a failing disk, and a server that does not answer.
    error=[errno.ESTALE, errno.EIO, errno.ETIMEDOUT],
)
def test_a_start_waits_for_storage_that_fails_for_a_moment(
    copy, flaky, read, name, error
):
    """For longer it is a failure of storage, which a job is started again after; not bad input."""
    expected = READS[read](copy)

    # Two failures are fewer than the pauses, so the third attempt succeeds.
    failed = flaky(name, error, 2)
    assert READS[read](copy) == expected
    assert len(failed) == 2

    # One that does not end.
    flaky(name, error, 10**6)
    with pytest.raises(StorageError, match=f"{name}: cannot be read"):
        READS[read](copy)


def test_keys_are_searched_anew_where_storage_fails_in_the_middle(
    many_groups, monkeypatch
):
    """What was found before the failure does not count twice."""
    calls = []
    read = pq.ParquetFile.read_row_groups

    def failing(file, *args, **more):
        calls.append(1)
        # Two groups of the split were read by then.
        if len(calls) == 3:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return read(file, *args, **more)

    # Every sixth key, so that all eleven groups of `train` are needed.
    rows = rows_of_split(many_groups, "train")
    names = [row["key"] for row in rows[1::6]]
    split = read_split(many_groups, split="train")
    monkeypatch.setattr(atomic_files, "READ_PAUSES_S", (0.0,))

    # One group per read, so that a failure comes in the middle.
    monkeypatch.setattr(index_module, "GROUPS_AT_ONCE", 1)
    monkeypatch.setattr(pq.ParquetFile, "read_row_groups", failing)
    listing = listed(many_groups / "keys", names)
    chosen = choose_by_key(split, listing)

    # The failed attempt is counted with the one before it; then all groups again.
    assert len(calls) == 2 + 1 + 11
    assert keys(chosen) == names


def test_missing_and_shortened_tars_are_all_named(copy):
    """One rank looks at them; the others read the index alone, and pass it on."""
    settings = DataSettings(path=str(copy), global_batch=2)
    # What was open before the damage keeps its order.
    whole = open_training_set(settings, seed=0)
    (copy / "train-000000.tar").unlink()
    (copy / "train-000002.tar").write_bytes(b"short")
    with pytest.raises(UserError) as caught:
        open_training_set(settings, seed=0)

    # One report for both files, with what can be done.
    text = str(caught.value)
    assert "train-000000.tar: missing" in text
    assert "train-000002.tar: 5 bytes, but the manifest says " in text
    assert "2 of 3 files" in text
    assert "make the shards again" in text

    # Splits that no tar is missing from can still be evaluated.
    assert read_split(copy, split="test").num_samples == 4

    # The other ranks, without a look at the tars; pickled as from rank to rank.
    unchecked = open_training_set(settings, seed=0, check_files=False)
    passed_on = pickle.loads(pickle.dumps(unchecked))
    assert passed_on.fingerprint == whole.fingerprint
    for position in range(40):
        assert passed_on.order.at(position) == whole.order.at(position)


# A manifest of another version or form, and three that contradict the index.
@rows("""
- [changes, message]
- [{format_version: 99}, "format_version: Input should be 3"]
- [{splits: {train: {}}}, "is not a valid manifest .splits.train.num_samples: "]
- [{index_bytes: 3}, but the manifest says 3]
- [{classes: []}, disagrees with manifest.json]
- [{classes: [cat]}, disagrees with manifest.json]
""")
def test_a_manifest_that_does_not_fit_is_refused(copy, changes, message):
    edit_manifest(copy, **changes)
    with refused(message):
        read_split(copy, split="train")


def stored_anew(folder: Path, column: str, value: int, **changes):
    """Write the places of `train` again, with one value in a column of all rows."""
    table = pq.read_table(folder / INDEX_NAME)
    table = table.filter(pc.equal(table["split"], "train"))
    number = table.schema.get_field_index(column)
    kind = table.schema.field(number).type
    table = table.set_column(number, column, pa.array([value] * len(table), kind))
    manifest = read_manifest(folder)
    shards = [*shards_of_split(folder, "train", manifest.splits["train"])]
    starts = (0, 7, 14)
    tars = [
        (shard, table[start : start + shard.samples])
        for shard, start in zip(shards, starts, strict=True)
    ]
    entry = write_split(folder, split="train", tars=tars)
    splits = manifest.splits | {"train": entry}
    edit_manifest(folder, **asdict(replace(manifest, splits=splits)), **changes)


# No bytes, behind the end of the tar, and no class.
@rows("""
- [column, value]
- [length, 0]
- [length, 1000000]
- [offset, 512000000]
- [label, 2]
- [label, -1]
""")
@every(at_start=[True, False])
def test_places_that_no_preparation_writes_are_refused(
    copy, column, value, at_start, monkeypatch
):
    stored_anew(copy, column, value)
    if not at_start:
        monkeypatch.setattr(index_module, "SAMPLES_AT_START", 0)
    with refused("disagrees with manifest.json"):
        read_split(copy, split="train").read(9)


def test_an_image_between_blocks_is_refused(copy):
    """No tar has one, and its place could not be stored."""
    with refused("begin at a multiple of 512 bytes"):
        stored_anew(copy, "offset", 513)
    with refused("within 2 TiB"):
        stored_anew(copy, "offset", 1 << 41)


@every(classes=[(), ("cat", "dog")])
def test_samples_have_no_label_if_there_are_no_classes(copy, classes):
    stored_anew(copy, "label", -1)
    edit_manifest(copy, classes=classes)

    # Classes without a single label would train on nothing.
    is_refused = refused("disagrees with manifest.json")
    with is_refused if classes else nullcontext():
        index = read_split(copy, split="train")
        assert set(index.label.tolist()) == {-1}


@every(at_start=[True, False])
def test_a_flipped_bit_in_a_place_is_found(copy, at_start, monkeypatch):
    """By the hash of the records of its tar; the other tars can be read."""
    if not at_start:
        monkeypatch.setattr(index_module, "SAMPLES_AT_START", 0)
    path = copy / "positions-train.bin"
    whole = path.read_bytes()
    assert len(whole) == 20 * 20
    for offset in range(7 * 20, 14 * 20, 3):
        flipped = bytearray(whole)
        flipped[offset] ^= 1 << offset % 8
        path.write_bytes(flipped)
        message = r"train-000001.tar are damaged(.|\n)*copy this file again"
        with refused(message):
            index = read_split(copy, split="train")
            assert index.locate(6).label == 0
            assert index.locate(14).label == 0
            index.locate(9)
        with refused(r"positions-train\.bin"):
            list(read_split(copy, split="train").pieces())


def test_a_flipped_bit_in_the_table_of_tars_is_found_or_harmless(copy):
    """It decides the order, which must not differ on one node."""
    path = copy / "tars-train.arrow"
    whole = path.read_bytes()
    expected = read_split(copy, split="train")
    num_found = 0
    for offset in range(len(whole)):
        flipped = bytearray(whole)
        flipped[offset] ^= 1 << offset % 8
        path.write_bytes(flipped)
        try:
            index = read_split(copy, split="train")
        except UserError as error:
            num_found += 1
            assert re.search(
                "next: (copy the folder|make the shards|do not use)", str(error)
            )
            continue
        assert index.ends.tolist() == expected.ends.tolist()
        assert index.locate(9)[1:] == expected.locate(9)[1:]
    assert num_found > 200


def test_tars_that_are_many_are_looked_at_when_they_are_read(copy, monkeypatch):
    monkeypatch.setattr(index_module, "TARS_AT_START", 2)
    (copy / "train-000000.tar").unlink()
    (copy / "train-000002.tar").write_bytes(b"short")
    index = read_split(copy, split="train")
    assert index.locate(9).label == 1
    with refused("train-000000.tar: missing"):
        index.locate(3)
    with refused("train-000002.tar: 5 bytes, but the manifest says "):
        index.locate(19)


def test_a_process_keeps_the_places_of_few_tars(copy, monkeypatch):
    monkeypatch.setattr(index_module, "RECENT_TARS", 2)
    index = read_split(copy, split="train")
    places = [index.locate(sample) for sample in range(20)]
    again = [index.locate(sample) for sample in reversed(range(20))]
    assert places == again[::-1]
    assert len(index._recent) == 2

    # Nor does it pass them on.
    assert len(pickle.dumps(index)) < 4000


def test_an_epoch_reads_the_places_of_each_tar_once(tmp_path, monkeypatch):
    """The benchmark of a billion samples, at ten thousand in a hundred tars."""
    for limit in ("TARS_AT_START", "SAMPLES_AT_START"):
        monkeypatch.setattr(index_module, limit, 0)
    num, per_tar = 10_000, 100
    make_index(tmp_path / "set", num_samples=num, num_tars=num // per_tar)
    training_set = synthetic_set(tmp_path / "set")
    (index,) = training_set.parts
    assert len(pickle.dumps(training_set)) < 10_000 + sum(map(len, index.classes)) * 2

    real = os.pread
    reads = []

    def pread(file, num_bytes, offset):
        reads.append((num_bytes, offset))
        return real(file, num_bytes, offset)

    monkeypatch.setattr(os, "pread", pread)
    seen = set()
    for position in range(num):
        sample = training_set.order.at(position).sample
        tar, number = divmod(sample, per_tar)
        place = index.locate(sample)
        seen.add(sample)

        # By the benchmark's own rule: 100 images, of 200 blocks each.
        prefix = int(splitmix(tar, per_tar)[number])
        expected = (number * 200 * 512, 198 * 512, prefix % 21841, prefix)
        assert place[1:5] == expected
        assert place.tar == tmp_path / f"set/train-{tar:06d}.tar"
    assert len(seen) == num
    assert sorted(reads) == [(2000, 2000 * tar) for tar in range(num // per_tar)]


# ---- training sets -------------------------------------------------------------------------------


def opened(path: Path, *, needs_labels: bool = True, **settings) -> TrainingSet:
    values = {
        "path": str(path),
        "global_batch": 2,
        **settings,
    }
    return open_training_set(
        DataSettings.model_validate(values), seed=0, needs_labels=needs_labels
    )


def listed(path: Path, names: list[str]) -> str:
    # Carriage returns: lists are also written on Windows.
    lines = "\r\n".join([*names, ""])
    path.write_text(lines)
    return str(path)


# Each setting alone and in pairs: classes and keys choose first, a share is of what is left.
@rows("""
- [settings, chosen]
- [{first_percent: 33}, [0, 1, 2, 3, 4, 5, 6]]
- [{only_classes: [dog]}, [1, 3, 5, 7, 9, 11, 13, 15, 17, 19]]
- [{only_classes: [dog], first_percent: 50}, [1, 3, 5, 7, 9]]
- [{only_keys: [train-c0-12, train-c1-3, train-c1-3, train-c1-7, not there]}, [3, 7, 12]]
- [{only_keys: [train-c0-12, train-c1-3, train-c1-7], first_percent: 50}, [3, 7]]
- [{dev_percent: 10}, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]]
- [{dev_percent: 10, first_percent: 50}, [0, 1, 2, 3, 4, 5, 6, 7, 8]]
- [{dev_percent: 40, first_percent: 50, only_classes: [dog]}, [1, 3, 5]]
""")
def test_a_subset_keeps_labels_and_places(shards, tmp_path, settings, chosen):
    if "only_keys" in settings:
        listing = listed(tmp_path / "keys.txt", settings["only_keys"])
        settings = settings | {"only_keys": listing}
    whole = opened(shards)
    part = opened(shards, **settings)
    (stored,) = whole.parts
    (index,) = part.parts

    assert keys(index) == [NAMES[row] for row in chosen]
    assert part.num_samples == len(chosen)

    # Labels and places are those of the whole set: a subset does not number classes anew.
    assert [*map(index.locate, range(len(chosen)))] == [*map(stored.locate, chosen)]
    assert index.label.tolist() == stored.label[chosen].tolist()
    assert sum(index.shard_lengths) == len(chosen)
    assert part.classes == ("cat", "dog")

    # A run does not resume with another subset.
    assert part.fingerprint != whole.fingerprint

    # What is held out and what is trained on are the whole together.
    if "dev_percent" in settings:
        uncut = opened(shards, **settings | {"dev_percent": 0.0})
        assert uncut.dev is None
        together = keys(index) + keys(part.dev)
        assert together == keys(uncut.parts[0])

        # None of the three may pass for another one.
        sets = (part, uncut, part.dev)
        assert len({training_set.fingerprint for training_set in sets}) == 3


def test_the_same_choice_from_another_file_is_the_same_set(shards, tmp_path):
    def chosen(names):
        listing = tmp_path / f"{len(names)}.txt"
        return opened(shards, only_keys=listed(listing, names))

    one = chosen(NAMES[3:6])

    # Other order, other file name, and a line that names nothing.
    two = chosen([*NAMES[5:2:-1], "not there"])
    three = chosen(NAMES[3:5])

    assert one.fingerprint == two.fingerprint
    assert one.key_hash == two.key_hash is not None
    assert one.key_hash != three.key_hash


def mixed_in(path: Path, share: float) -> dict[str, Any]:
    return {"path": str(path), "share": share}


@pytest.fixture
def other(tmp_path) -> Path:
    """8 samples with the same classes as `shards`, in one tar, and no image in common."""
    return write_shard_folder(
        tmp_path / "b",
        num_per_class=4,
        num_shards=1,
        seed=5,
    )


def test_a_mixture_names_all_its_parts(shards, other):
    mixed = opened(shards, mixture=[mixed_in(other, 0.25)])
    assert mixed.num_samples == 20 + 8
    assert mixed.order.shares == (750_000, 250_000)

    # A fingerprint tells sets, shares, views and the place of each part.
    sets = [
        mixed,
        opened(shards),
        opened(shards, mixture=[mixed_in(other, 0.5)]),
        opened(shards, repeats=2),
        opened(shards, repeats=3),
        opened(other, mixture=[mixed_in(shards, 0.25)]),
    ]
    fingerprints = {training_set.fingerprint for training_set in sets}
    assert len(fingerprints) == len(sets)


def test_the_cache_must_hold_the_largest_tars_of_each_set():
    # Tars of 20 to 39 MiB.
    tars = SimpleNamespace(num_bytes=np.arange(20, 40) << 20)
    parts = [SimpleNamespace(is_remote=True, tars=tars)] * 2

    # What is read at the same time: the sixteen largest, of each of two sets.
    gib = 2 * sum(range(24, 40)) / 1024
    _check_cache(parts, RemoteSettings(cache_gib=gib))
    with refused("0.984 GiB or more"):
        _check_cache(parts, RemoteSettings(cache_gib=gib - 0.001))


def test_images_held_out_are_found_in_what_is_mixed_in(shards, copy, other, capsys):
    # The set itself and a copy elsewhere: images are recognized by their content.
    for path in (shards, copy):
        with refused(r"mixture\[0\].* 2 of the images .*holds out"):
            opened(shards, mixture=[mixed_in(path, 0.5)], dev_percent=10)

    # One that has none of them may be mixed in.
    mixture = [mixed_in(other, 0.2)]
    opened(shards, mixture=mixture, dev_percent=10)

    # A separate split that is also trained on is reported, not refused.
    settings = DataSettings(
        path=str(shards),
        global_batch=2,
        val_split="train",
    )
    mixture.append(mixed_in(copy, 0.2))
    training_set = opened(shards, mixture=mixture)
    open_val_split(settings, parts=training_set.parts)
    assert capsys.readouterr().out == f"{copy}: training reads 20 images of 'train'\n"


# In a folder with these sets of shards. What is opened, a setting, and what is wrong with it.
UNFIT = r"""
- [set, mixture, [{path: owls, share: 0.5}], '\[0\].*2 cl.*labels.s']
- [set, mixture, [{path: unlabelled, share: 0.5}], its 0 classes differ]
- [unlabelled, only_classes, [dog], no class .*manifest.json]
- [set, only_classes, [dgo], "no class 'dgo'.*did you mean dog"]
- [set, dev_percent, 1.0, "1 % of 20 training samples is 0, .* none to evaluate"]
- [set, dev_percent, 99.0, none to train on.*a share of 1 to 19 samples]
- [set, only_keys, unknown.txt, "none of the 20 samples.*such as 'train-c0-0'"]
- [set, only_keys, missing.txt, "data.only_keys=.*missing.txt: cannot be read .No such file.*next"]
- [set, only_keys, binary.txt, cannot be read]
"""


def test_what_does_not_fit_is_refused(shards, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Other classes, and no classes.
    few = {"num_per_class": 4, "num_shards": 1}
    write_shard_folder(tmp_path / "owls", classes=("cat", "owl"), **few)
    write_shard_folder(tmp_path / "unlabelled", classes=(), **few)

    # The lists: none of its keys is there, no such file, and not a text.
    (tmp_path / "set").symlink_to(shards)
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    listed(tmp_path / "unknown.txt", ["x"])
    for path, key, value, message in yaml.safe_load(UNFIT):
        with refused(f"(?s){message}"):
            opened(Path(path), **{key: value})

    # Where no label is read, any images may be mixed in, and a line says what is not used.
    for name, num_classes in (("owls", 2), ("unlabelled", 0)):
        mixed = opened(Path("set"), mixture=[mixed_in(name, 0.5)], needs_labels=False)
        assert mixed.classes == opened(Path("set")).classes
        note = f"{name}: labels are ignored, also by evaluations: its {num_classes} classes"
        assert mixed.parts[1].note.startswith(note)
        assert not mixed.parts[0].note
