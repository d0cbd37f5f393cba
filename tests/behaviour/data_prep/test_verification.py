from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.formats.index_files import INDEX_SCHEMA, write_manifest
from data_prep.verification import check_folder, check_tar, tar_tasks
from tests.support.corpora.shard_folders import make_shard_folder
from vitscale.config.errors import UserError
from vitscale.data.index import INDEX_NAME, read_manifest
from vitscale.distributed.atomic_files import blake3_of_file

TRAIN = "train-000000.tar"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound") / "shards"
    make_shard_folder(folder)
    return folder


@pytest.fixture
def shards(sound: Path, tmp_path: Path) -> Path:
    shutil.copytree(sound, tmp_path / "shards")
    return tmp_path / "shards"


def findings(folder: Path) -> list[str]:
    return check_folder(folder, manifest=read_manifest(folder), num_workers=1)


def check_of_first(folder: Path) -> Callable[[], list[str]]:
    """A function that checks the first tar of `train`."""
    tasks = tar_tasks(pq.read_table(folder / INDEX_NAME), read_manifest(folder))
    task = next(task for task in tasks if task[0].name == TRAIN)
    return partial(check_tar, task, folder=folder, root=folder, ours=True)


def test_a_sound_folder_has_no_findings(sound: Path) -> None:
    assert findings(sound) == []


def test_tars_behind_a_url_are_refused_and_not_called_damaged(shards: Path) -> None:
    manifest = replace(read_manifest(shards), shards_root="https://host/shards")
    write_manifest(shards, manifest=manifest)
    with pytest.raises(UserError, match="https://host/shards is a URL(.|\n)*download"):
        findings(shards)


def test_a_cut_at_every_offset_is_found(shards: Path) -> None:
    check, num_bytes = check_of_first(shards), (shards / TRAIN).stat().st_size
    with open(shards / TRAIN, "r+b") as file:
        for size in reversed(range(num_bytes)):
            file.truncate(size)
            found = check()
            assert "content differs from the manifest (BLAKE3)" in found
            # Without the manifest's hash, the index alone would have found it too.
            assert len(found) > 1


def test_a_changed_byte_at_every_offset_is_found(shards: Path) -> None:
    check, whole = check_of_first(shards), (shards / TRAIN).read_bytes()
    with open(shards / TRAIN, "r+b", buffering=0) as file:
        for offset in range(0, len(whole)):
            file.seek(offset)
            file.write(bytes([whole[offset] ^ 1 << offset % 8]))
            # By the hash, and by the index alone.
            assert len(check()) >= 2, offset
            file.seek(offset)
            file.write(whole[offset : offset + 1])
    assert check() == []


def rewritten(folder: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    """Change the rows of the index, and let the manifest say that this is right."""
    rows = pq.read_table(folder / INDEX_NAME).to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=INDEX_SCHEMA), folder / INDEX_NAME)
    manifest = replace(
        read_manifest(folder),
        index_bytes=(folder / INDEX_NAME).stat().st_size,
        index_blake3=blake3_of_file(folder / INDEX_NAME),
    )
    write_manifest(folder, manifest=manifest)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda rows: rows[2].update(width=99), "'train-c0-0': is ('png', 5, 4), but the index"),
        (lambda rows: rows[2].update(key="x"), "sample 'x': has another name, size, place or"),
        (lambda rows: rows[2].update(key="x"), "are not the samples of the index"),
        (lambda rows: rows[2].update(label=7), "1 labels are outside 0 to 2"),
        (lambda rows: rows[2].update(label=1), "'train-c0-0': has another name, size, place"),
        (lambda rows: rows[2].update(offset=1 << 40), "lies outside the tar"),
        (lambda rows: rows[3].update(offset=rows[2]["offset"]), "has another name, size, place"),
        (lambda rows: rows.pop(2), "holds more than the samples of the index"),
        (
            lambda rows: rows[2].update(shard="other.tar"),
            "samples of the manifest's tars, in their",
        ),
        (lambda rows: rows.clear(), "not have the samples of the manifest's tars"),
        (lambda rows: rows.insert(2, rows.pop(3)), "do not have the manifest's fingerprint"),
        (lambda rows: rows[2].update(blake3=None), "not have the samples of the manifest's tars"),
    ],
)
def test_an_index_that_was_written_wrongly_is_found(
    shards: Path, change: Callable[[list[dict[str, Any]]], object], message: str
) -> None:
    rewritten(shards, change)
    found = findings(shards)
    assert any(message in text for text in found), found


@pytest.mark.parametrize("label", [0, -2])
def test_labels_in_a_folder_without_classes_are_found(tmp_path: Path, label: int) -> None:
    folder = tmp_path / "shards"
    make_shard_folder(folder, classes=())
    assert findings(folder) == []
    rewritten(folder, lambda rows: rows[2].update(label=label))
    assert f"{INDEX_NAME}: 1 labels are outside -1 to -1" in findings(folder)


@pytest.mark.parametrize("name", [INDEX_NAME, "ledger.parquet", "_info.json", TRAIN])
def test_missing_and_cut_files_are_found(shards: Path, name: str) -> None:
    data = (shards / name).read_bytes()
    (shards / name).unlink()
    missing = findings(shards)
    assert any(text.startswith(f"{name}: cannot be read") for text in missing), missing
    (shards / name).write_bytes(data[: len(data) // 2])
    assert any(text.startswith(name) for text in findings(shards))


def test_other_index_columns_are_refused(shards: Path) -> None:
    pq.write_table(pa.table({"key": ["a"]}), shards / INDEX_NAME)
    found = findings(shards)
    assert any("has other columns" in text for text in found)
    assert not any(text.startswith("train") for text in found), "the tars are sound"


def test_a_ledger_of_other_sums_is_found(shards: Path) -> None:
    write_manifest(shards, manifest=replace(read_manifest(shards), inputs={"num_rows": 9}))
    assert "ledger.parquet: has other sums than the manifest" in findings(shards)
