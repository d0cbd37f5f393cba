import random
import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.duplicates.reading import list_samples
from data_prep.formats.index_files import INDEX_SCHEMA, write_index, write_manifest
from data_prep.sources.tables import _batches as rows_of
from data_prep.verification import (
    _batches,
    _check_index,
    _check_ledger,
    check_folder,
    check_tar,
    draw_sheet,
    tar_tasks,
)
from tests.support.corpora.shard_folders import make_shard_folder
from tests.support.tables import Values, every, refused, rows
from vitscale.data.index import INDEX_NAME, ShardEntry, SplitEntry, read_manifest
from vitscale.distributed.atomic_files import blake3_of_file
from vitscale.images.jpeg.entry_points import entry_points_file

TRAIN = "train-000000.tar"
# Kept as long as the process: what Arrow frees later goes back to them.
POOLS = []


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sound") / "shards"
    make_shard_folder(folder)
    return folder


@pytest.fixture
def shards(sound: Path, tmp_path) -> Path:
    shutil.copytree(sound, tmp_path / "shards")
    return tmp_path / "shards"


def findings(folder: Path) -> list[str]:
    return check_folder(folder, manifest=read_manifest(folder), num_workers=1)


def check_of_first(folder: Path) -> Callable[[], list[str]]:
    """A function that checks the first tar of `train`."""
    tasks = tar_tasks([pq.read_table(folder / INDEX_NAME)], read_manifest(folder))
    task = next(task for task in tasks if task[0].name == TRAIN)
    return partial(check_tar, task, folder=folder, root=folder, ours=True)


def test_a_sound_folder_has_no_findings(sound):
    assert findings(sound) == []


def test_tars_behind_a_url_are_refused_and_not_called_damaged(shards):
    manifest = replace(read_manifest(shards), shards_root="https://host/shards")
    write_manifest(shards, manifest=manifest)
    with refused("https://host/shards is a URL(.|\n)*download"):
        findings(shards)


def test_a_cut_at_every_offset_is_found(shards):
    check = check_of_first(shards)
    num_bytes = (shards / TRAIN).stat().st_size
    with open(shards / TRAIN, "r+b") as file:
        for size in reversed(range(num_bytes)):
            file.truncate(size)
            found = check()
            assert "content differs from the manifest (BLAKE3)" in found

            # Without the manifest's hash, the index alone would have found it too.
            assert len(found) > 1


def test_a_changed_byte_at_every_offset_is_found(shards):
    check = check_of_first(shards)
    whole = (shards / TRAIN).read_bytes()
    with open(shards / TRAIN, "r+b", buffering=0) as file:
        for offset in range(0, len(whole)):
            file.seek(offset)
            file.write(bytes([whole[offset] ^ 1 << offset % 8]))

            # By the hash, and by the index alone.
            assert len(check()) >= 2, offset
            file.seek(offset)
            file.write(whole[offset : offset + 1])
    assert check() == []


def rewritten(folder: Path, change: Callable[[list[Values]], object]) -> None:
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


# The order of the rows, new values in one of them, and what is found.
@rows("""
- [order, values, message]
- ['01234', {width: 99}, "'train-c0-0': is ('png', 5, 4), but the index"]
- ['01234', {key: x}, "sample 'x': has another name, size, place or"]
- ['01234', {key: x}, are not the samples of the index]
- ['01234', {label: 7}, 1 labels are outside 0 to 2]
- ['01234', {label: 1}, "'train-c0-0': has another name, size, place"]
- ['01234', {offset: 1099511627776}, lies outside the tar]
- ['01234', {offset: 1536}, "has another name, size, place"]
- ['0134', {}, holds more than the samples of the index]
- ['01234', {shard: other.tar}, "samples of the manifest's tars, in their"]
- ['', {}, "not have the samples of the manifest's tars"]
- ['01324', {}, "do not have the manifest's fingerprint"]
- ['01234', {blake3: null}, "not have the samples of the manifest's tars"]
""")
def test_an_index_that_was_written_wrongly_is_found(shards, order, values, message):
    def change(index_rows):
        index_rows[2].update(values)
        index_rows[:5] = [index_rows[int(number)] for number in order]

    rewritten(shards, change)
    found = findings(shards)
    assert any(message in text for text in found), found


@every(label="0, -2")
def test_labels_in_a_folder_without_classes_are_found(tmp_path, label):
    folder = tmp_path / "shards"
    make_shard_folder(folder, classes=())
    assert findings(folder) == []
    rewritten(folder, lambda rows: rows[2].update(label=label))
    assert f"{INDEX_NAME}: 1 labels are outside -1 to -1" in findings(folder)


@every(name=[INDEX_NAME, "ledger.parquet", "_info.json", TRAIN])
def test_missing_and_cut_files_are_found(shards, name):
    data = (shards / name).read_bytes()
    (shards / name).unlink()
    missing = findings(shards)
    assert any(text.startswith(f"{name}: cannot be read") for text in missing), missing
    (shards / name).write_bytes(data[: len(data) // 2])
    assert any(text.startswith(name) for text in findings(shards))
    check_folder(
        shards, manifest=read_manifest(shards), num_workers=1, write_entry_points=True
    )
    assert name != TRAIN or not entry_points_file(shards, TRAIN).exists()


def test_other_index_columns_are_refused(shards):
    pq.write_table(pa.table({"key": ["a"]}), shards / INDEX_NAME)
    found = findings(shards)
    assert any("has other columns" in text for text in found)
    assert not any(text.startswith("train") for text in found), "the tars are sound"


# Changes of the first row or of the second, and of their order.
@rows("""
- [number, change, is_found]
- [1, {key: other}, true]
- [1, {split: val}, true]
- [1, {status: rejected}, true]
- [1, {status: repaired}, false]
- [0, {key: null}, true]
- [null, reversed, true]
- [null, doubled, true]
""")
@every(batch_rows="1, 2, 1000")
def test_the_samples_of_ledger_and_index_are_compared_in_pieces(
    shards, number, change, is_found, batch_rows, monkeypatch
):
    monkeypatch.setattr("data_prep.verification.BATCH_ROWS", batch_rows)
    assert findings(shards) == []
    rows = pq.read_table(shards / "ledger.parquet").to_pylist()
    if change == "reversed":
        rows.reverse()
    elif change == "doubled":
        rows.append(rows[0])
    else:
        rows[number] |= change
    table = pa.Table.from_pylist(rows, schema=pq.read_schema(shards / "ledger.parquet"))
    pq.write_table(table, shards / "ledger.parquet", row_group_size=3)
    what = (
        "ledger.parquet: the inputs kept or repaired are not the samples of the index"
    )
    assert (what in findings(shards)) == is_found


def test_memory_does_not_grow_with_the_samples(tmp_path, monkeypatch):
    """At most 60 bytes a row: Arrow's peak and Python's, over all that sees every row."""
    monkeypatch.setattr("data_prep.verification.BATCH_ROWS", 1_000)
    num = 100_000
    per_tar = 2_000
    folder = tmp_path / "shards"
    make_shard_folder(folder)
    schema = pq.read_schema(folder / "ledger.parquet")
    names = [f"train-n01440764-n01440764_{number}" for number in range(num)]
    tars = [f"train-{number // per_tar:06d}.tar" for number in range(num)]
    columns = {"key": names, "split": ["train"] * num, "shard": tars}
    columns |= {name: [1] * num for name in "offset length label width height".split()}
    columns |= {"format": ["jpg"] * num, "blake3": [bytes(32)] * num}
    write_index(folder, tables=[pa.table(columns, schema=INDEX_SCHEMA)])
    ledger = {name: [None] * num for name in schema.names}
    ledger |= {"split": columns["split"], "key": names, "status": ["kept"] * num}
    pq.write_table(
        pa.table(ledger, schema=schema), folder / "ledger.parquet", row_group_size=8_192
    )
    entries = tuple(
        ShardEntry(name=name, samples=per_tar, bytes=0, blake3="")
        for name in dict.fromkeys(tars)
    )
    split = SplitEntry(num_samples=num, num_bytes=0, fingerprint="", shards=entries)
    old = read_manifest(folder)
    manifest = replace(
        old, splits={"train": split}, inputs={"num_rows": num}, classes=("a", "b")
    )
    del names, tars, columns, ledger
    usual = pa.default_memory_pool()
    tracked = pa.proxy_memory_pool(usual)
    POOLS.append(tracked)
    pa.set_memory_pool(tracked)
    tracemalloc.start()
    try:
        found = [*_check_index(folder, manifest, is_index=True)]
        found += _check_ledger(folder, manifest, has_index=True)
        pieces = _batches(folder / INDEX_NAME)
        seen = [len(rows) for _, rows in tar_tasks(pieces, manifest)]
        _, python = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(usual)
    assert seen == [per_tar] * (num // per_tar)
    assert all("fingerprint" in text or "BLAKE3" in text for text in found), found
    assert 0 < tracked.max_memory() + python < 60 * num


@every(reader="verification, source")
def test_a_parquet_file_is_never_held_as_a_whole(reader, tmp_path):
    """Random bytes, which do not get smaller in the file: 8 MB in 32 groups of rows."""
    path = tmp_path / "rows.parquet"
    num = 8_000
    table = pa.table({"image": [random.randbytes(1000) for _ in range(num)]})
    pq.write_table(table, path, row_group_size=num // 32)
    del table
    before = pa.total_allocated_bytes()
    peak = before
    seen = 0
    with pq.ParquetFile(path) as file:
        pieces = (
            _batches(path)
            if reader == "verification"
            else rows_of(file, ["image"], path=path)
        )
        for piece in pieces:
            seen += len(piece)
            peak = max(peak, pa.total_allocated_bytes())
    assert seen == num
    assert peak - before < 2_000_000


@every(name=["../x.tar", "/x.tar", "a/../../x.tar", "..", "", "a\0.tar"])
def test_a_manifest_that_names_files_outside_is_refused(shards, name):
    manifest = read_manifest(shards)
    first = manifest.splits["train"].shards[0]
    split = replace(manifest.splits["train"], shards=(replace(first, name=name),))
    write_manifest(shards, manifest=replace(manifest, splits={"train": split}))
    with refused("which may lie outside its folder"):
        read_manifest(shards)
    with refused("which may lie outside its folder"):
        list_samples(shards)


def test_an_index_that_names_other_tars_is_not_followed(shards, tmp_path):
    (tmp_path / "secret").write_bytes(b"x" * 10_000)
    rewritten(shards, lambda rows: rows[0].update(shard="../secret"))
    with refused("names the tar '../secret', which manifest.json does not"):
        list_samples(shards)
    with refused("names the tar '../secret', which manifest.json does not"):
        draw_sheet(tmp_path / "sheet.png", shards, read_manifest(shards))


@every(link="entry_points, entry_points/deep")
def test_entry_points_are_not_written_through_links(shards, tmp_path, link):
    (tmp_path / "victim").mkdir()
    name = f"deep/{TRAIN}" if "/" in link else TRAIN
    (shards / name).parent.mkdir(exist_ok=True)
    (shards / TRAIN).rename(shards / name)
    (shards / link).parent.mkdir(exist_ok=True)
    (shards / link).symlink_to(tmp_path / "victim")
    rewritten(
        shards,
        lambda rows: [row.update(shard=name) for row in rows if row["shard"] == TRAIN],
    )
    manifest = read_manifest(shards)
    tars = tuple(
        replace(shard, name=name) if shard.name == TRAIN else shard
        for shard in manifest.splits["train"].shards
    )
    split = replace(manifest.splits["train"], shards=tars)
    manifest = replace(manifest, splits=manifest.splits | {"train": split})
    found = check_folder(
        shards, manifest=manifest, num_workers=1, write_entry_points=True
    )
    assert any("a link leads out of" in text for text in found)
    assert not list((tmp_path / "victim").iterdir())


def test_a_ledger_of_other_sums_is_found(shards):
    write_manifest(
        shards, manifest=replace(read_manifest(shards), inputs={"num_rows": 9})
    )
    assert "ledger.parquet: has other sums than the manifest" in findings(shards)
