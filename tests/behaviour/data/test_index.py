"""Indexes and manifests, and the training sets made of them: subsets and mixtures."""

import errno
import json
import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import yaml

from data_prep.formats import index_files
from data_prep.formats.index_files import write_index
from tests.support.corpora.shard_folders import make_shard_folder, write_shard_folder
from tests.support.tables import every, refused, rows
from vitscale.config.errors import StorageError, UserError
from vitscale.data import index as index_module
from vitscale.data.index import (
    INDEX_NAME,
    MANIFEST_NAME,
    SplitIndex,
    choose_by_key,
    narrowed,
    read_split,
    sample_keys,
    sample_names,
)
from vitscale.data.remote import RemoteFile, Url
from vitscale.data.settings import DataSettings, RemoteSettings
from vitscale.data.training_set import (
    TrainingSet,
    _check_cache,
    open_training_set,
    open_val_split,
)
from vitscale.data.webdataset import tar_samples, tars_of_split
from vitscale.distributed import atomic_files


def edit_manifest(folder: Path, **changes) -> None:
    path = folder / MANIFEST_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    """20 samples of 2 classes in 3 tars, and a split `test` of 4 samples stored before them."""
    folder = tmp_path_factory.mktemp("set") / "a"
    lengths = {"test": (2, 2), "train": (7, 7, 6)}
    make_shard_folder(folder, lengths=lengths, classes=("cat", "dog"))
    return folder


@pytest.fixture
def copy(shards: Path, tmp_path) -> Path:
    return shutil.copytree(shards, tmp_path / "copy")


def keys(index: SplitIndex) -> list[str]:
    return sample_keys(index, range(index.num_samples))


NAMES = [f"train-c{number % 2}-{number}" for number in range(20)]


def test_a_split_is_read_without_the_others(shards):
    index = read_split(shards, split="train")
    rows = pq.read_table(shards / INDEX_NAME).to_pylist()[4:]
    assert index.shard_of.tolist() == [0] * 7 + [1] * 7 + [2] * 6
    assert index.offset.tolist() == [row["offset"] for row in rows]
    assert index.length.tolist() == [row["length"] for row in rows]
    assert index.label.tolist() == [0, 1] * 10
    assert index.classes == ("cat", "dog")

    # The first eight bytes tell whether a sample was damaged.
    hashes = [int.from_bytes(row["blake3"][:8], "little") for row in rows]
    assert index.hash_prefix.tolist() == hashes
    assert keys(index) == NAMES


def test_columns_are_as_narrow_as_their_values():
    for value, dtype in (
        (-1, "int8"),
        (21_842, "int16"),
        (2**31 - 1, "int32"),
        (2**31, "int64"),
    ):
        found = narrowed(np.array([0, value]))
        assert found.tolist() == [0, value]
        assert found.dtype == dtype


@pytest.fixture
def many_groups(tmp_path, monkeypatch) -> Path:
    """41 samples of `train` and 9 of `test`, in row groups of four."""
    monkeypatch.setattr(index_files, "ROW_GROUP_ROWS", 4)
    make_shard_folder(tmp_path / "set", lengths={"test": (9,), "train": (20, 21)})
    assert pq.ParquetFile(tmp_path / "set" / INDEX_NAME).num_row_groups == 3 + 11
    return tmp_path / "set"


@every(seed=range(4), split="test, train")
def test_keys_of_any_samples_are_those_of_the_table(many_groups, split, seed):
    rows = pq.read_table(many_groups / INDEX_NAME).to_pylist()
    expected = [row["key"] for row in rows if row["split"] == split]
    random = np.random.default_rng(seed)
    index = read_split(many_groups, split=split)
    wanted = random.integers(0, len(expected), 25).tolist()
    assert sample_keys(index, wanted) == [expected[row] for row in wanted]
    subset = np.sort(random.choice(len(expected), 7, replace=False))
    names = [expected[row] for row in subset]
    assert keys(index.subset(subset, name="some")) == names
    assert sample_keys(index, []) == []

    # A list by hand may name what is gone; two such lines are counted.
    listing = listed(many_groups / "keys", [*names, "other", "unknown"])
    chosen = choose_by_key(index, listing)
    assert keys(chosen) == names
    assert "2 lines of data.only_keys name no sample" in chosen.note
    assert "'unknown'" in chosen.note
    assert choose_by_key(index, listed(many_groups / "keys", names)).note == ""

    # That other settings leave out a sample does not matter.
    some = index.subset(subset[1:], name="some")
    assert choose_by_key(some, listed(many_groups / "keys", names)).note == ""


def damage_keys(path: Path, row_group: int) -> None:
    """Overwrite the keys of a row group on the disk."""
    column = pq.ParquetFile(path).metadata.row_group(row_group).column(0)
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
    for row_group in {*range(14)} - {3, 3 + 5}:
        damage_keys(path, row_group)
    found = sample_names([index], [(0, 21), (0, 3)])
    assert found == [repr("train-c0-21"), repr("train-c0-3")]


def shortened(path: Path) -> None:
    """An index with the first three rows of each split."""
    table = pq.read_table(path)
    splits = [
        table.filter(pc.equal(table["split"], name)) for name in ("test", "train")
    ]
    write_index(path.parent, tables=[split.slice(0, 3) for split in splits])


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_bytes(b"damaged"),
        lambda path: path.write_bytes(b""),
        lambda path: damage_keys(path, 1),
        lambda path: path.unlink(),
        lambda path: pq.write_table(pq.read_table(path, columns=["split"]), path),
        lambda path: pq.write_table(pq.read_table(path, columns=["key"]), path),
        lambda path: pq.write_table(pq.read_table(path), path, write_statistics=False),
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
    assert sample_names([index], [(0, 6), (0, 1)]) == [repr(NAMES[6]), repr(NAMES[1])]

    change(copy / INDEX_NAME)
    assert sample_names([index], [(0, 6)]) == ["number 6 of 'train'"]
    with pytest.raises(UserError):
        sample_keys(index, [6])


# ---- storage that fails -------------------------------------------------------------------------


@pytest.fixture
def flaky(monkeypatch) -> Callable[[str, int, int], list[str]]:
    """Make reads of files with a name fail so often with an error; returns what they were."""
    monkeypatch.setattr(atomic_files, "READ_PAUSES_S", (0.0,) * 3)

    def start(name: str, error: int, times: int) -> list[str]:
        failed = []

        def failing(real):
            def call(path, *args, **more):
                if str(path).endswith(name) and len(failed) < times:
                    failed.append(str(path))
                    raise OSError(error, os.strerror(error))
                return real(path, *args, **more)

            return call

        for owner, function in (
            *(
                (Path, function)
                for function in "read_bytes stat is_dir is_file".split()
            ),
            *((pq, function) for function in ("read_table", "ParquetFile")),
            (os, "listdir"),
        ):
            monkeypatch.setattr(owner, function, failing(getattr(owner, function)))
        return failed

    return start


def first_key_of_stream(folder: Path) -> str:
    how = {"num_classes": 0, "seed": 0, "start": 0, "process": 0}
    return next(tar_samples([folder / "train-000001.tar"], num_processes=1, **how))[1]


READS = {
    "index": lambda folder: keys(read_split(folder, split="train")),
    "listing": lambda folder: tars_of_split(folder, "train", where="data.train_split"),
    "stream": first_key_of_stream,
}


@pytest.mark.parametrize(
    ("read", "name"),
    [
        *product(
            ["index"], [MANIFEST_NAME, INDEX_NAME, "train-000001.tar", "entry_points"]
        ),
        ("listing", "copy"),
        ("stream", "train-000001.tar"),
    ],
)
@every(error=[errno.ESTALE, errno.EIO, errno.ETIMEDOUT])
def test_a_start_waits_for_storage_that_fails_for_a_moment(
    copy, flaky, read, name, error
):
    """For longer it is a failure of storage, which a job is started again after; not bad input."""
    expected = READS[read](copy)
    failed = flaky(name, error, 2)
    assert READS[read](copy) == expected
    assert len(failed) == 2
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
        if len(calls) == 3:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return read(file, *args, **more)

    rows = pq.read_table(many_groups / INDEX_NAME).to_pylist()
    names = [row["key"] for row in rows if row["split"] == "train"][1::6]
    split = read_split(many_groups, split="train")
    monkeypatch.setattr(atomic_files, "READ_PAUSES_S", (0.0,))

    # One group per read, so that a failure comes in the middle.
    monkeypatch.setattr(index_module, "GROUPS_AT_ONCE", 1)
    monkeypatch.setattr(pq.ParquetFile, "read_row_groups", failing)
    chosen = choose_by_key(split, listed(many_groups / "keys", names))
    assert len(calls) == 2 + 1 + 11
    assert keys(chosen) == names


def test_missing_and_shortened_tars_are_all_named(copy):
    """One rank looks at them; the others read the index alone, and pass it on."""
    settings = DataSettings(path=str(copy), global_batch=2)
    whole = open_training_set(settings, seed=0)
    (copy / "train-000000.tar").unlink()
    (copy / "train-000002.tar").write_bytes(b"short")
    with pytest.raises(UserError) as caught:
        open_training_set(settings, seed=0)
    text = str(caught.value)
    assert "train-000000.tar: missing" in text
    assert "train-000002.tar: 5 bytes, but the manifest says " in text
    assert "2 of 4 files" in text
    assert "make the shards again" in text
    assert read_split(copy, split="test").num_samples == 4

    # The other ranks, without a look at the tars.
    unchecked = open_training_set(settings, seed=0, check_files=False)
    passed_on = pickle.loads(pickle.dumps(unchecked))
    assert passed_on.fingerprint == whole.fingerprint
    assert [passed_on.order.at(i) for i in range(40)] == [
        whole.order.at(i) for i in range(40)
    ]


@rows("""
- [changes, message]
- [{format_version: 99}, "format_version: Input should be 2"]
- [{splits: {train: {}}}, "is not a valid manifest .splits.train.num_samples: "]
- [{index_bytes: 3}, but the manifest says 3]
- [{classes: []}, disagrees with manifest.json]
- [{classes: [cat]}, disagrees with manifest.json]
""")
def test_a_manifest_that_does_not_fit_is_refused(copy, changes, message):
    edit_manifest(copy, **changes)
    with refused(message):
        read_split(copy, split="train")


def test_rows_that_no_preparation_writes_are_refused(copy):
    table = pq.read_table(copy / INDEX_NAME)
    zeros = pa.array([0] * len(table))
    for changed in (table[::-1], table.set_column(4, "length", zeros)):
        write_index(copy, tables=[changed.cast(table.schema)])
        edit_manifest(copy, index_bytes=(copy / INDEX_NAME).stat().st_size)
        with refused("disagrees with manifest.json|do not say which split"):
            read_split(copy, split="train")


@every(classes=[(), ("cat", "dog")])
def test_samples_have_no_label_if_there_are_no_classes(copy, classes):
    table = pq.read_table(copy / INDEX_NAME)
    column = pa.array([-1] * len(table), pa.int32())
    table = table.set_column(table.schema.get_field_index("label"), "label", column)
    write_index(copy, tables=[table.slice(0, 4), table.slice(4)])
    edit_manifest(copy, classes=classes, index_bytes=(copy / INDEX_NAME).stat().st_size)
    is_refused = refused("disagrees with manifest.json")
    with is_refused if classes else nullcontext():
        assert set(read_split(copy, split="train").label.tolist()) == {-1}


# ---- training sets -------------------------------------------------------------------------------


def opened(path: Path, **settings) -> TrainingSet:
    values = {"path": str(path), "global_batch": 2, **settings}
    return open_training_set(DataSettings.model_validate(values), seed=0)


def listed(path: Path, names: list[str]) -> str:
    path.write_text("".join(f"{name}\r\n" for name in names))
    return str(path)


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
        settings = settings | {
            "only_keys": listed(tmp_path / "keys.txt", settings["only_keys"])
        }
    whole = opened(shards)
    part = opened(shards, **settings)
    (stored,) = whole.parts
    (index,) = part.parts
    assert keys(index) == [NAMES[row] for row in chosen]
    assert part.num_samples == len(chosen)
    np.testing.assert_array_equal(index.label, stored.label[chosen])
    np.testing.assert_array_equal(index.offset, stored.offset[chosen])
    assert sum(index.shard_lengths) == len(chosen)
    assert part.classes == ("cat", "dog")
    assert part.fingerprint != whole.fingerprint

    # What is held out and what is trained on are the whole together.
    if "dev_percent" in settings:
        uncut = opened(shards, **{**settings, "dev_percent": 0.0})
        assert part.dev is not None
        assert uncut.dev is None
        assert [*keys(index), *keys(part.dev)] == keys(uncut.parts[0])
        assert len({part.fingerprint, uncut.fingerprint, part.dev.fingerprint}) == 3


def test_the_same_choice_from_another_file_is_the_same_set(shards, tmp_path):
    one, two, three = (
        opened(shards, only_keys=listed(tmp_path / f"{number}.txt", names))
        for number, names in enumerate(
            (NAMES[3:6], [*NAMES[5:2:-1], "not there"], NAMES[3:5])
        )
    )
    assert one.fingerprint == two.fingerprint
    assert one.key_hash == two.key_hash is not None
    assert one.key_hash != three.key_hash


def test_a_mixture_names_all_its_parts(shards, tmp_path):
    other = write_shard_folder(tmp_path / "b", num_per_class=4, num_shards=1, seed=5)
    mixed = opened(shards, mixture=[{"path": str(other), "share": 0.25}])
    assert mixed.num_samples == 28
    assert mixed.order.shares == (750_000, 250_000)
    others = [
        opened(shards),
        opened(shards, mixture=[{"path": str(other), "share": 0.5}]),
        opened(shards, views=2),
        opened(shards, views=3),
        opened(other, mixture=[{"path": str(shards), "share": 0.25}]),
    ]
    assert len({mixed.fingerprint, *(each.fingerprint for each in others)}) == 6


def test_the_cache_must_hold_the_largest_tars_of_each_set():
    sizes = range(20 << 20, 40 << 20, 1 << 20)
    tars = [RemoteFile(Url("http://x/y"), size, "", Path(), 0) for size in sizes]
    parts = [SimpleNamespace(shards=tars)] * 2

    # The sixteen largest of 20 to 39 MiB, of each of two sets.
    gib = 2 * sum(range(24, 40)) / 1024
    _check_cache(parts, RemoteSettings(cache_gib=gib))
    with refused("0.984 GiB or more"):
        _check_cache(parts, RemoteSettings(cache_gib=gib - 0.001))


def test_images_held_out_are_found_in_what_is_mixed_in(shards, copy, tmp_path, capsys):
    for path in (shards, copy):
        with refused(r"mixture\[0\].* 2 of the images .*holds out"):
            opened(shards, mixture=[{"path": str(path), "share": 0.5}], dev_percent=10)
    other = write_shard_folder(tmp_path / "b", num_per_class=4, num_shards=1, seed=5)
    mixture = [{"path": str(path), "share": 0.2} for path in (other, copy)]
    opened(shards, mixture=mixture[:1], dev_percent=10)
    settings = DataSettings(path=str(shards), global_batch=2, val_split="train")
    open_val_split(settings, parts=opened(shards, mixture=mixture).parts)
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
    few = {"num_per_class": 4, "num_shards": 1}
    write_shard_folder(tmp_path / "owls", classes=("cat", "owl"), **few)
    write_shard_folder(tmp_path / "unlabelled", classes=(), **few)
    (tmp_path / "set").symlink_to(shards)
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    listed(tmp_path / "unknown.txt", ["x"])
    for path, key, value, message in yaml.safe_load(UNFIT):
        with refused(f"(?s){message}"):
            opened(Path(path), **{key: value})
