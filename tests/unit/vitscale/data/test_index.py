from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.formats.index_files import write_index, write_info, write_manifest
from vitscale.config.errors import UserError
from vitscale.data.index import (
    FORMAT_VERSION,
    INDEX_NAME,
    Manifest,
    ShardEntry,
    SplitEntry,
    index_schema,
    read_manifest,
    read_split,
)
from vitscale.data.index_keys import sample_keys, sample_names

SPLITS = {"test": (3, 1), "train": (3, 3, 1)}
SHARD_BYTES = 4096


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A shard folder with real side files and tars of zeros (their content is not read here)."""
    tables, entries = [], {}
    for split, lengths in SPLITS.items():
        names = [f"{split}-{number:06d}.tar" for number in range(len(lengths))]
        rows = [
            {
                "key": f"{split}-{name[-5]}-{i}",
                "split": split,
                "shard": name,
                "offset": 512 + 1024 * i,
                "length": 100 + i,
                "format": "jpg",
                "label": i % 2,
                "width": 8,
                "height": 8,
                "blake3": bytes(32),
            }
            for name, length in zip(names, lengths, strict=True)
            for i in range(length)
        ]
        tables.append(pa.Table.from_pylist(rows, schema=index_schema()))
        shards = []
        for name, length in zip(names, lengths, strict=True):
            (tmp_path / name).write_bytes(bytes(SHARD_BYTES))
            shards.append(ShardEntry(name=name, samples=length, bytes=SHARD_BYTES, blake3=""))
        entries[split] = SplitEntry(
            num_samples=sum(lengths), num_bytes=0, fingerprint=split, shards=tuple(shards)
        )
    write_index(tmp_path, tables=tables)
    write_info(tmp_path, splits=entries)
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        tool_version="",
        fingerprint="",
        source_fingerprint="",
        label_map_sha256="",
        classes=("cat", "dog"),
        inputs={},
        index_bytes=(tmp_path / INDEX_NAME).stat().st_size,
        index_blake3="",
        splits=entries,
        config={"seed": 1},
    )
    write_manifest(tmp_path, manifest=manifest)
    assert read_manifest(tmp_path) == manifest
    return tmp_path


def edit_manifest(folder: Path, **changes: object) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_split_is_read_without_the_others(folder: Path) -> None:
    index = read_split(folder, split="train")
    assert index.num_samples == 7
    assert index.shard_of.tolist() == [0, 0, 0, 1, 1, 1, 2]
    assert index.offset.tolist() == [512, 1536, 2560, 512, 1536, 2560, 512]
    assert index.length.tolist() == [100, 101, 102, 100, 101, 102, 100]
    assert index.label.tolist() == [0, 1, 0, 0, 1, 0, 0]
    first = ["train-0-0", "train-0-1", "train-0-2", "train-1-0"]
    assert sample_keys(index, range(4)) == first
    assert (index.classes, index.fingerprint) == (("cat", "dog"), "train")
    assert (index.shard_of.dtype, index.offset.dtype, index.label.dtype) == (
        "int32",
        "int64",
        "int32",
    )


def test_a_few_keys_are_read_without_the_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pq.read_table(folder / INDEX_NAME)
    # In row groups of two; one of them holds rows of both splits.
    pq.write_table(table, folder / INDEX_NAME, row_group_size=2)
    edit_manifest(folder, index_bytes=(folder / INDEX_NAME).stat().st_size)
    index = read_split(folder, split="train")
    keys = table.column("key").to_pylist()[4:]
    assert sample_keys(index, range(7)) == keys
    assert index.subset(np.array([0, 2]), name="first").shard_lengths == (2, 0, 0)
    some = index.subset(np.array([1, 4, 6]), name="some")
    assert sample_keys(some, [2, 0, 2]) == [keys[6], keys[1], keys[6]]
    read = []
    real = pq.ParquetFile.read_row_group

    def noted(file: pq.ParquetFile, group: int, columns: list[str]) -> pa.Table:
        read.append((group, *columns))
        return real(file, group, columns=columns)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", noted)
    assert sample_keys(index, [5]) == [keys[5]]
    assert read == [(4, "key")]


def test_a_sample_without_a_readable_key_is_named_by_number(folder: Path) -> None:
    index = read_split(folder, split="train")
    assert sample_names([index], [(0, 6), (0, 1)]) == ["'train-2-0'", "'train-0-1'"]
    with pytest.raises(UserError, match="keys of samples"):
        sample_keys(index, [7])
    (folder / INDEX_NAME).write_bytes(b"damaged")
    assert sample_names([index], [(0, 6)]) == ["number 6 of 'train'"]


def test_missing_and_shortened_tars_are_all_named(folder: Path) -> None:
    (folder / "train-000000.tar").unlink()
    (folder / "train-000002.tar").write_bytes(b"short")
    with pytest.raises(UserError) as caught:
        read_split(folder, split="train")
    text = str(caught.value)
    assert "train-000000.tar: missing" in text
    assert "train-000002.tar: 5 bytes, but the manifest says 4096" in text
    assert "make the shards again" in text
    assert read_split(folder, split="test").num_samples == 4


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"format_version": 99}, "format version 99 is unknown"),
        ({"splits": {"train": {}}}, "is not a valid manifest"),
        ({"classes": ["cat"]}, "disagrees with manifest.json"),
        ({"index_bytes": 3}, "but the manifest says 3"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(
    folder: Path, changes: dict[str, object], message: str
) -> None:
    edit_manifest(folder, **changes)
    with pytest.raises(UserError, match=message):
        read_split(folder, split="train")


@pytest.mark.parametrize(
    ("labels", "classes", "is_read"),
    [
        ((-1, -1), (), True),
        ((-1, 0), (), False),
        ((0, 0), (), False),
        ((-2, -1), (), False),
        ((-1, 0), ("cat", "dog"), False),
        ((0, 2), ("cat", "dog"), False),
        ((0, 1), ("cat", "dog"), True),
    ],
)
def test_samples_have_no_label_if_there_are_no_classes(
    folder: Path, labels: tuple[int, int], classes: tuple[str, ...], is_read: bool
) -> None:
    table = pq.read_table(folder / INDEX_NAME)
    column = pa.array([labels[i % 2] for i in range(len(table))], pa.int32())
    table = table.set_column(table.schema.get_field_index("label"), "label", column)
    write_index(folder, tables=[table.slice(0, 4), table.slice(4)])
    size = (folder / INDEX_NAME).stat().st_size
    edit_manifest(folder, classes=classes, index_bytes=size)
    if is_read:
        index = read_split(folder, split="train")
        assert index.classes == classes and set(index.label.tolist()) == set(labels)
    else:
        with pytest.raises(UserError, match="disagrees with manifest.json"):
            read_split(folder, split="train")
