"""data_prep/make_shards.py with settings that select, label and resize images."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from PIL import Image

from tests.support.corpora.image_corpus import contents, corpus, ledger, make_shards
from tests.support.corpora.shard_folders import photo
from vitscale.data.index import read_manifest, read_split


def make(source: Path, output: Path, *options: str, rc: int = 0) -> str:
    return make_shards(source, output, "source.holdout_fraction=0.0", *options, rc=rc)


def samples(folder: Path, split: str = "train") -> set[tuple[bytes, str]]:
    """(image, class name) of every stored sample."""
    index = read_split(folder, split=split)
    tars = [path.read_bytes() for path in index.shards]
    rows = zip(index.shard_of, index.offset, index.length, index.label, strict=True)
    return {(tars[s][o : o + n], index.classes[label]) for s, o, n, label in rows}


def test_a_path_that_a_table_repeats_is_one_sample(tmp_path: Path) -> None:
    corpus(tmp_path / "source", num=2)
    lines = ["image,label", "cat/000.jpg,cat", "dog/000.jpg,dog", "cat/000.jpg,cat"]
    (tmp_path / "source/table.csv").write_text("\n".join(lines))
    options = ("source.kind=path_table", "images.max_bad_fraction=0.5")
    make(tmp_path / "source/table.csv", tmp_path / "shards", *options)
    rows = pq.read_table(tmp_path / "shards/ledger.parquet").to_pylist()
    assert sorted(row["reason"] or "" for row in rows) == ["", "", "duplicate_path"]


def save(image: Image.Image, path: Path, **options: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)  # type: ignore[arg-type]  # Pillow takes any encoder option


def test_small_classes_leave_and_every_class_holds_out_the_same(tmp_path: Path) -> None:
    root = tmp_path / "images"
    for name, num in (("cat", 12), ("dog", 13), ("rare", 2)):
        for i in range(num):
            path = root / name / f"{i:02d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(photo(100 * num + i))
    options = (
        "source.min_images_per_class=3",
        "source.val_per_class=4",
        "source.holdout_split=val",
    )
    text = make(root, tmp_path / "shards", *options)
    rows = ledger(tmp_path / "shards")
    assert {path for path, row in rows.items() if row["reason"] == "small_class"} == {
        "rare/00.jpg",
        "rare/01.jpg",
    }
    assert read_manifest(tmp_path / "shards").classes == ("cat", "dog")
    assert "27 inputs = 25 kept + 2 rejected" in text
    kept = [row for row in rows.values() if row["status"] == "kept"]
    assert Counter((row["split"], row["class"]) for row in kept) == {
        ("val", "cat"): 4,
        ("val", "dog"): 4,
        ("train", "cat"): 8,
        ("train", "dog"): 9,
    }
    make(root, tmp_path / "again", *options, "num_workers=1")
    assert contents(tmp_path / "again") == contents(tmp_path / "shards")


def test_labels_follow_a_space_and_others_are_refused(tmp_path: Path) -> None:
    root = tmp_path / "images"
    for synset in ("n02119789", "n01440764"):
        for i in range(3):
            path = root / synset / f"{i}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(photo(hash_of(synset) + i))
    make(root, tmp_path / "shards", "labels.space=imagenet_1k")
    manifest = read_manifest(tmp_path / "shards")
    assert len(manifest.classes) == 1000
    labels = set(read_split(tmp_path / "shards", split="train").label.tolist())
    assert labels == {manifest.classes.index(s) for s in ("n02119789", "n01440764")}
    (root / "n99999999").mkdir()
    (root / "n99999999" / "0.jpg").write_bytes(photo(9))
    text = make(root, tmp_path / "other", "labels.space=imagenet_1k", rc=2)
    assert "n99999999" in text and "1 class" in text and "next:" in text
    assert not (tmp_path / "other").exists()


def hash_of(text: str) -> int:
    return int.from_bytes(text.encode()[:6], "big") % 10_000


def test_images_are_resized_on_request_with_ledger_detail(tmp_path: Path) -> None:
    root = tmp_path / "images"
    for i, side in enumerate((300, 280, 60)):
        save(
            Image.open(io.BytesIO(photo(i, width=side + 40, height=side))),
            root / "cat" / f"{i}.png",
        )
    save(Image.fromarray(np.full((80, 80), 40_000, np.uint16)), root / "cat" / "deep.png")
    make(root, tmp_path / "shards", "images.short_side=100")
    rows = ledger(tmp_path / "shards")
    assert {path: (row["status"], row["reason"]) for path, row in rows.items()} == {
        "cat/0.png": ("repaired", "short_side"),
        "cat/1.png": ("repaired", "short_side"),
        "cat/2.png": ("kept", None),
        "cat/deep.png": ("repaired", "16_bit"),
    }
    sizes = sorted(
        min(Image.open(io.BytesIO(image)).size) for image, _ in samples(tmp_path / "shards")
    )
    assert sizes == [60, 80, 100, 100]
    info = json.loads((tmp_path / "shards" / "manifest.json").read_text())
    assert info["inputs"]["num_repaired"] == 3
