"""Classes, labels and held-out images of small corpora, prepared in the test process."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np

from data_prep.verification import check_folder
from tests.support.corpora.image_corpus import encoded, ledger
from tests.support.corpora.preparing import prepare_here, run_of
from vitscale.data.index import read_manifest, read_split
from vitscale.data.index_keys import sample_keys

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
