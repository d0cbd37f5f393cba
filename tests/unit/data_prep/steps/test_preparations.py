"""Small corpora prepared in the test process: classes, settings, rejected inputs."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.formats.ledger import Outcomes, write_ledger
from data_prep.sources.protocol import Outage
from data_prep.steps import write_shard
from data_prep.steps.settings import changed_settings, content_config, find_existing
from data_prep.steps.work import WorkFolder
from data_prep.verification import check_folder
from tests.support.corpora.image_corpus import corpus, encoded, ledger
from tests.support.corpora.preparing import prepare_here, run_of
from vitscale.config.errors import UserError
from vitscale.data.index import read_manifest, read_split, sample_keys

NUM_PICTURES = 8


def test_files_that_will_be_refused_need_no_space(tmp_path: Path) -> None:
    for number in range(NUM_PICTURES):
        write(tmp_path / "images" / f"cat/{number}.png", seed=number)
    with open(tmp_path / "images/cat/hole.png", "wb") as file:
        file.truncate(1 << 42)  # sparse: 4 TiB that take no disk
    images = {"max_bad_fraction": 1}
    prepare_here(run_of(tmp_path / "images", tmp_path / "shards", images=images))
    rows = ledger(tmp_path / "shards")
    assert rows["cat/hole.png"]["reason"] == "too_large"
    assert len(rows) == NUM_PICTURES + 1
    shards = read_manifest(tmp_path / "shards").splits["train"].shards
    assert [shard.samples for shard in shards] == [NUM_PICTURES]


def write(path: Path, *, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded("PNG", seed=seed))


def test_ignored_classes_leave_no_label(tmp_path: Path) -> None:
    for number in range(20):
        write(tmp_path / f"images/{'' if number % 4 else 'sub/'}{number}.png", seed=number)
    source = {"holdout_fraction": 0.2}
    run = run_of(tmp_path / "images", tmp_path / "s", source=source, labels={"values": "none"})
    prepare_here(run)
    manifest = read_manifest(tmp_path / "s")
    assert manifest.classes == ()
    sizes = {name: entry.num_samples for name, entry in manifest.splits.items()}
    assert sizes == {"train": 16, "test": 4}
    keys, members = set(), set()
    for split in sizes:
        index = read_split(tmp_path / "s", split=split)
        assert set(index.label.tolist()) == {-1}
        keys |= {
            key.removeprefix(f"{split}-") for key in sample_keys(index, range(len(index.label)))
        }
        for path in index.shards:
            with tarfile.open(path) as tar:
                members.update(tar.getnames())
    assert {name.rpartition(".")[2] for name in members} == {"png"} and len(members) == 20
    assert {key for key in keys if "sub" not in key} == {str(n) for n in range(20) if n % 4}
    assert {row["class"] for row in ledger(tmp_path / "s").values()} == {None}
    found = check_folder(tmp_path / "s", manifest=manifest, num_workers=1, advance=lambda num: None)
    assert found == []


def test_a_held_out_split_never_takes_all_images_of_a_class(tmp_path: Path) -> None:
    for name, num in (("few", 2), ("many", 5), ("one", 1)):
        for number in range(num):
            write(tmp_path / f"images/{name}/{number}.png", seed=100 * num + number)
    source = {"val_per_class": 2, "holdout_split": "val"}
    prepare_here(run_of(tmp_path / "images", tmp_path / "s", source=source))
    found = {}
    for split in ("train", "val"):
        index = read_split(tmp_path / "s", split=split)
        found[split] = np.bincount(index.label, minlength=3).tolist()
    assert index.classes == ("few", "many", "one")
    assert found == {"train": [1, 3, 1], "val": [1, 2, 0]}


def test_a_mount_point_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "shards").symlink_to("/proc")
    for output in (tmp_path / "shards", Path("/proc")):
        with pytest.raises(UserError, match=r"mount point(.|\n)*next: .*/proc/shards"):
            find_existing(WorkFolder(run_of(tmp_path, output)))


@pytest.mark.parametrize("fault", ["gone", "cut"])
def test_no_output_gets_its_name_without_all_its_tars(fault: str, tmp_path: Path) -> None:
    run = run_of(corpus(tmp_path / "images"), tmp_path / "shards")
    work = prepare_here(run, until="finish")
    tar = next((work.path / "tars").glob("train-*.tar"))
    if fault == "gone":
        tar.unlink()
    else:
        os.truncate(tar, tar.stat().st_size - 512)
    with pytest.raises(Outage, match="train-000000.tar, written before, is missing or has"):
        prepare_here(run)
    assert not (tmp_path / "shards").exists() and work.path.exists()


LABEL_FILES = {"map": "map.csv", "space": "space.txt"}


@pytest.mark.parametrize("key", LABEL_FILES)
def test_changed_label_files_change_the_settings(key: str, tmp_path: Path) -> None:
    (tmp_path / "map.csv").write_text("cat,animal\ndog,animal\n")
    (tmp_path / "space.txt").write_text("animal\nplant\n")
    labels = {key: str(tmp_path / name) for key, name in LABEL_FILES.items()}
    run = run_of(tmp_path / "images", tmp_path / "shards", labels=labels)
    before = content_config(run)
    assert changed_settings(before, content_config(run)) == []
    (tmp_path / LABEL_FILES[key]).write_text("plant\nanimal\n" if key == "space" else "cat,plant\n")
    assert changed_settings(before, content_config(run)) == [f"labels.{key}_blake3"]
    (tmp_path / LABEL_FILES[key]).unlink()
    with pytest.raises(UserError, match=f"labels.{key}"):
        content_config(run)


@pytest.mark.parametrize("key", ["leave_out", "val_labels"])
def test_a_changed_list_changes_the_settings(key: str, tmp_path: Path) -> None:
    listed = tmp_path / "list"
    run = run_of(tmp_path, tmp_path / "out", source={key: str(listed)})
    with pytest.raises(UserError, match=f"source.{key}"):
        content_config(run)
    listed.write_bytes(b"one")
    before = content_config(run)
    listed.write_bytes(b"other")
    assert changed_settings(before, content_config(run)) == [f"source.{key}_blake3"]


def test_a_rotten_corpus_is_refused_before_all_of_it_is_read(tmp_path: Path) -> None:
    for i in range(40):
        path = tmp_path / "images" / "ab"[i % 2] / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"rotten {i}".encode())
    sections = {"shards": {"min_shards": 8}, "images": {"max_bad_fraction": 0.2}}
    run = run_of(tmp_path / "images", tmp_path / "shards", **sections)
    work = prepare_here(run, until="write shards")
    units = write_shard.shard_units(work)
    write_shard.write_shard(work, units[0])
    write_shard.check_bad(work, units[:1])
    write_shard.write_shard(work, units[1])
    with pytest.raises(UserError, match="at least 10 of 40 images are bad.*\n.*10 not_an_image"):
        write_shard.check_bad(work, units[:2])


def gone(folder: Path) -> Path:
    (folder / "t.csv").write_text("image,label\n1.jpg,a\n2.jpg,a\n")
    return folder / "t.csv"


def listed_label(folder: Path) -> Path:
    (folder / "1.jpg").write_bytes(b"")
    pq.write_table(pa.table({"image": ["1.jpg"], "label": [["a"]]}), folder / "t.parquet")
    return folder / "t.parquet"


def truncated(folder: Path) -> Path:
    (folder / "t.parquet").write_bytes(b"PAR1 cut")
    return folder / "t.parquet"


def other_names(folder: Path) -> Path:
    (folder / "cat").mkdir()
    (folder / "cat" / "1.txt").write_bytes(b"")
    return folder


@pytest.mark.parametrize(
    "make, kind, message",
    [
        (gone, "path_table", "2 unreadable .*missing.*: '1.jpg', '2.jpg'"),
        (listed_label, "path_table", r"1 no_label .no .* source.label says: .*: '1.jpg'"),
        (truncated, "path_table", "1 damaged_table .*: 't.parquet'"),
        (truncated, "parquet", "1 damaged_table .*: 't.parquet'"),
        (other_names, "image_folder", "1 other_name .*: 'cat/1.txt'"),
    ],
)
def test_when_every_input_is_rejected_the_error_says_why(
    make: Any, kind: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "source").mkdir()
    run = run_of(make(tmp_path / "source"), tmp_path / "shards", source={"kind": kind})
    with pytest.raises(UserError, match=rf"all \d inputs are rejected\n  {message}\n  next:"):
        prepare_here(run)


def test_a_split_without_a_sound_file_is_refused(tmp_path: Path) -> None:
    table = pa.table({"image": [encoded("PNG", seed=1)], "label": ["a"]})
    pq.write_table(table, tmp_path / "train.parquet")
    (tmp_path / "val.parquet").write_bytes(b"PAR1 cut")
    splits = {"train": "train.parquet", "val": "val.parquet"}
    run = run_of(
        tmp_path,
        tmp_path / "shards",
        source={"kind": "parquet", "splits": splits},
        images={"max_bad_fraction": 1},
    )
    with pytest.raises(UserError, match="'val' has no usable image\n.*1 damaged_table") as error:
        prepare_here(run)
    assert "source.splits.val" in error.value.text()


def sums_of(folder: Path, reasons: list[str | None]) -> Outcomes:
    columns: dict[str, list[str | None]] = {
        "path": [f"{i}" for i in range(len(reasons))],
        "reason": reasons,
        **dict.fromkeys(("split", "class", "changes", "detail", "key"), [None] * len(reasons)),
    }
    arrays = {name: pa.array(values, pa.string()) for name, values in columns.items()}
    return write_ledger(
        folder, [pa.table(arrays | {"blake3": pa.nulls(len(reasons), pa.binary(32))})]
    )


def test_files_of_other_names_do_not_dilute_the_limit(tmp_path: Path) -> None:
    others = ["other_name", "hidden"] * 500
    ledger = sums_of(tmp_path, ["bad_pixels"] * 2 + [None] * 8 + others)
    ledger.check(max_bad_fraction=0.2)
    with pytest.raises(UserError, match="2 of 10 images are bad, more than the fraction 0.19"):
        ledger.check(max_bad_fraction=0.19)


def test_images_left_out_by_the_settings_are_not_bad(tmp_path: Path) -> None:
    ledger = sums_of(tmp_path, ["small_class", "left_out", None])
    ledger.check(max_bad_fraction=0.0)
