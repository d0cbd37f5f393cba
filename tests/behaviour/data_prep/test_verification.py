import json
import random
import shutil
import tracemalloc
from dataclasses import asdict, replace
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.duplicates.reading import list_samples
from data_prep.formats.index_files import (
    INDEX_SCHEMA,
    shards_of,
    write_index,
    write_manifest,
    write_split,
    write_tars,
)
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
from tests.support.tables import every, refused, rows
from vitscale.data.index import INDEX_NAME, ShardEntry, read_manifest, read_split
from vitscale.distributed.atomic_files import blake3_of_file
from vitscale.images.jpeg.entry_points import entry_points_file

TRAIN = "train-000000.tar"
# Kept as long as the process: what Arrow frees later goes back to them.
POOLS = []


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound") / "shards"
    make_shard_folder(folder)
    return folder


@pytest.fixture
def shards(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / "shards")


def change_manifest(folder, **changes):
    manifest = replace(read_manifest(folder), **changes)
    write_manifest(folder, manifest=manifest)


def findings(folder):
    return check_folder(folder, manifest=read_manifest(folder), num_workers=1)


def check_of_first(folder):
    """A function that checks the first tar of `train`."""
    index = pq.read_table(folder / INDEX_NAME)
    tasks = tar_tasks([index], shards_of(folder, read_manifest(folder)))
    task = next(task for task in tasks if task[0].name == TRAIN)
    return partial(check_tar, task, folder=folder, root=folder, ours=True)


def test_a_sound_folder_has_no_findings(sound):
    assert findings(sound) == []


def test_tars_behind_a_url_are_refused_and_not_called_damaged(shards):
    change_manifest(shards, shards_root="https://host/shards")
    with refused("https://host/shards is a URL(.|\n)*download"):
        findings(shards)


def test_a_cut_at_every_offset_is_found(shards):
    check = check_of_first(shards)
    num_bytes = (shards / TRAIN).stat().st_size

    # From the end, so that each cut shortens the file of the one before.
    with open(shards / TRAIN, "r+b") as file:
        for size in reversed(range(num_bytes)):
            file.truncate(size)
            found = check()
            assert "content differs from the manifest (BLAKE3)" in found

            # Without the manifest's hash, the index alone would have found it too.
            assert len(found) > 1


def test_a_changed_byte_at_every_offset_is_found(shards):
    check = check_of_first(shards)
    path = shards / TRAIN
    whole = path.read_bytes()
    with open(path, "r+b", buffering=0) as file:
        for offset in range(len(whole)):
            # One bit: padding and checksums must not hide it.
            file.seek(offset)
            file.write(bytes([whole[offset] ^ 1 << offset % 8]))

            # By the hash, and by the index alone.
            assert len(check()) >= 2, offset
            file.seek(offset)
            file.write(whole[offset : offset + 1])

    # All was put back: the findings were of these bytes.
    assert check() == []


def rewritten(folder, change):
    """Change the rows of the index, and let the manifest say that this is right."""
    path = folder / INDEX_NAME
    rows = pq.read_table(path).to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=INDEX_SCHEMA), path)
    size = path.stat().st_size
    change_manifest(folder, index_bytes=size, index_blake3=blake3_of_file(path))


def rename_tar(folder, name):
    """Change the name of the first tar of `train` in the table, as if it was written so."""
    path = folder / "tars-train.arrow"
    table = pa.ipc.open_file(path.read_bytes()).read_all()
    columns = table.to_pydict()
    columns["name"][0] = name
    stored = write_tars(path, columns)
    splits = read_manifest(folder).splits
    train = replace(splits["train"], tars=stored)
    path = folder / "manifest.json"
    values = json.loads(path.read_text())
    values["splits"]["train"] = asdict(train)
    path.write_text(json.dumps(values))


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
    # The first two rows are of `test`, so row 2 is the first of the tar.
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

    # Without classes every label is -1.
    rewritten(folder, lambda rows: rows[2].update(label=label))
    assert f"{INDEX_NAME}: 1 labels are outside -1 to -1" in findings(folder)


@every(name=[INDEX_NAME, "ledger.parquet", "_info.json", TRAIN])
def test_missing_and_cut_files_are_found(shards, name):
    path = shards / name
    data = path.read_bytes()
    path.unlink()
    missing = findings(shards)
    assert any(text.startswith(f"{name}: cannot be read") for text in missing), missing

    path.write_bytes(data[: len(data) // 2])
    assert any(text.startswith(name) for text in findings(shards))

    # Entry points of a damaged tar would lead into other bytes.
    manifest = read_manifest(shards)
    options = {"num_workers": 1, "write_entry_points": True}
    check_folder(shards, manifest=manifest, **options)
    assert name != TRAIN or not entry_points_file(shards, TRAIN).exists()


def test_other_index_columns_are_refused(shards):
    pq.write_table(pa.table({"key": ["a"]}), shards / INDEX_NAME)
    found = findings(shards)
    assert any("has other columns" in text for text in found)
    assert not any(text.startswith("train") for text in found), "the tars are sound"


# Changes of the first row or of the second, and of their order. A repaired image is a sample.
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
    path = shards / "ledger.parquet"
    rows = pq.read_table(path).to_pylist()
    if change == "reversed":
        rows.reverse()
    elif change == "doubled":
        rows.append(rows[0])
    else:
        rows[number] |= change
    table = pa.Table.from_pylist(rows, schema=pq.read_schema(path))

    # Groups of rows that are not those of the pieces.
    pq.write_table(table, path, row_group_size=3)
    finding = (
        f"{path.name}: the inputs kept or repaired are not the samples of the index"
    )
    assert (finding in findings(shards)) == is_found


def test_memory_does_not_grow_with_the_samples(tmp_path, monkeypatch):
    """At most 60 bytes a row: Arrow's peak and Python's, over all that sees every row."""
    monkeypatch.setattr("data_prep.verification.BATCH_ROWS", 1_000)
    num = 100_000
    per_tar = 2_000
    folder = tmp_path / "shards"
    make_shard_folder(folder)
    ledger_path = folder / "ledger.parquet"
    schema = pq.read_schema(ledger_path)

    # An index and a ledger of many rows, as long as those of ImageNet.
    names = [f"train-n01440764-n01440764_{number}" for number in range(num)]
    tars = [f"train-{number // per_tar:06d}.tar" for number in range(num)]
    columns = {
        "key": names,
        "split": ["train"] * num,
        "shard": tars,
        "format": ["jpg"] * num,
        "blake3": [bytes(32)] * num,
    }
    columns |= {name: [1] * num for name in "length label width height".split()}
    columns["offset"] = [512] * num
    write_index(folder, tables=[pa.table(columns, schema=INDEX_SCHEMA)])
    ledger = {name: [None] * num for name in schema.names}
    ledger |= {
        "split": columns["split"],
        "key": names,
        "status": ["kept"] * num,
    }
    table = pa.table(ledger, schema=schema)
    pq.write_table(table, ledger_path, row_group_size=8_192)

    # The manifest that fits them.
    rows = pa.table(columns, schema=INDEX_SCHEMA)
    entries = [
        ShardEntry(name=name, samples=per_tar, bytes=1024, blake3="00" * 32)
        for name in dict.fromkeys(tars)
    ]
    of_tars = [
        (entry, rows.slice(number * per_tar, per_tar))
        for number, entry in enumerate(entries)
    ]
    split = write_split(folder, split="train", tars=of_tars)
    split = replace(split, fingerprint="")
    del rows, of_tars
    manifest = replace(
        read_manifest(folder),
        splits={"train": split},
        inputs={"num_rows": num},
        classes=("a", "b"),
    )
    del names, tars, columns, ledger, table

    # Both kinds of memory from here on; the old pool comes back whatever happens.
    usual = pa.default_memory_pool()
    tracked = pa.proxy_memory_pool(usual)
    POOLS.append(tracked)
    pa.set_memory_pool(tracked)
    tracemalloc.start()
    try:
        found = [*_check_index(folder, manifest, is_index=True)]
        found += _check_ledger(folder, manifest, has_index=True)
        pieces = _batches(folder / INDEX_NAME)
        tasks = tar_tasks(pieces, shards_of(folder, manifest))
        lengths = [len(rows) for _, rows in tasks]
        _, python = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(usual)

    # Every row was seen, and only the made-up hashes are wrong.
    assert lengths == [per_tar] * (num // per_tar)
    for text in found:
        assert "fingerprint" in text or "BLAKE3" in text
    assert 0 < tracked.max_memory() + python < 60 * num


@every(reader="verification, source")
def test_a_parquet_file_is_never_held_as_a_whole(reader, tmp_path):
    """Random bytes, which do not get smaller in the file: 8 MB in 32 groups of rows."""
    path = tmp_path / "rows.parquet"
    num = 8_000
    images = [random.randbytes(1000) for _ in range(num)]
    pq.write_table(pa.table({"image": images}), path, row_group_size=num // 32)
    del images
    before = pa.total_allocated_bytes()
    peak = before
    num_seen = 0
    with pq.ParquetFile(path) as file:
        pieces = rows_of(file, ["image"], path=path)
        if reader == "verification":
            pieces = _batches(path)
        for piece in pieces:
            num_seen += len(piece)
            peak = max(peak, pa.total_allocated_bytes())
    assert num_seen == num

    # A quarter of the file: a few groups.
    assert peak - before < 2_000_000


# Up, from the root, up behind a folder, the folder itself, and names that are none.
@every(name=["../x.tar", "/x.tar", "a/../../x.tar", "..", "", "a\0.tar"])
def test_a_manifest_that_names_files_outside_is_refused(shards, name):
    rename_tar(shards, name)
    with refused("which may lie outside its folder"):
        list(list_samples(shards))
    with refused("which may lie outside its folder"):
        read_split(shards, split="train")


@every(name=["../x", "/x", "..", "", "a/b"])
def test_a_split_whose_files_are_outside_is_refused(shards, name):
    train = read_manifest(shards).splits["train"]
    path = shards / "manifest.json"
    values = json.loads(path.read_text())
    values["splits"] = {name: asdict(train)}
    path.write_text(json.dumps(values))
    with refused("files may lie outside its folder"):
        read_manifest(shards)


def test_an_index_that_names_other_tars_is_not_followed(shards, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"x" * 10_000)
    rewritten(shards, lambda rows: rows[0].update(shard="../secret"))

    # Its bytes would be shown as a picture.
    message = "names the tar '../secret', which the tables of tars do not"
    with refused(message):
        list(list_samples(shards))
    with refused(message):
        draw_sheet(tmp_path / "sheet.png", shards, read_manifest(shards))


@every(link="entry_points, entry_points/deep")
def test_entry_points_are_not_written_through_links(shards, tmp_path, link):
    victim = tmp_path / "victim"
    victim.mkdir()

    # The folder itself is a link, or one inside it, for a tar in a sub-folder.
    name = f"deep/{TRAIN}" if "/" in link else TRAIN
    tar = shards / name
    tar.parent.mkdir(exist_ok=True)
    (shards / TRAIN).rename(tar)
    link_path = shards / link
    link_path.parent.mkdir(exist_ok=True)
    link_path.symlink_to(victim)

    # Index and manifest name the tar at its new place.
    def rename(rows):
        for row in rows:
            if row["shard"] == TRAIN:
                row["shard"] = name

    rewritten(shards, rename)
    rename_tar(shards, name)
    manifest = read_manifest(shards)
    options = {"num_workers": 1, "write_entry_points": True}
    found = check_folder(shards, manifest=manifest, **options)
    assert any("a link leads out of" in text for text in found)
    assert list(victim.iterdir()) == []


def test_a_ledger_of_other_sums_is_found(shards):
    change_manifest(shards, inputs={"num_rows": 9})
    assert "ledger.parquet: has other sums than the manifest" in findings(shards)
