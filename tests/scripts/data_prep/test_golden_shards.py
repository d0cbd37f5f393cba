"""Shards of eight fixed images, byte for byte, from every kind of source.

The images of tests/golden/images, JPEGs: grey, CMYK, progressive, rotated by EXIF, truncated; PNGs:
RGB, palette; one text file. The split test holds every other one.
"""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from blake3 import blake3

from tests.support.corpora import image_corpus
from tests.support.corpora.external_tars import tar_bytes, write_tars
from tests.support.corpora.image_corpus import run_script
from tests.support.corpora.sources import written
from tests.support.golden import FOLDER
from tests.support.tables import every

# Without splits of its own: the held-out part, and the places in two tars, come from the seed.
HELD_OUT = ("source.splits={}", "source.holdout_fraction=0.3", "shards.min_shards=2")
IMAGES = FOLDER / "images"


def images(split):
    """Paths as CLASS/NAME below IMAGES."""
    paths = sorted(path.relative_to(IMAGES) for path in IMAGES.glob("*/*"))
    if split == "test":
        return paths[::2]
    return paths


def image_folder(root):
    for split in ("train", "test"):
        for path in images(split):
            written(root / split / path, (IMAGES / path).read_bytes())


def class_tars(root):
    """A folder of tars for train, one tar of them for test."""
    for split in ("train", "test"):
        tars = {"cat.tar": {}, "dog.tar": {}}
        for path in images(split):
            content = (IMAGES / path).read_bytes()
            tars[f"{path.parent}.tar"][path.name] = content
        if split == "train":
            write_tars(root / split, tars)
        else:
            # As ImageNet-21k is handed out: one tar, of which each member is the tar of a class.
            packed = {name: tar_bytes(members) for name, members in tars.items()}
            write_tars(root, {"test.tar": packed})


def webdataset_tars(root):
    # Two tars for train, so that a range of names has something to expand to.
    tars = {
        "train-0.tar": images("train")[::2],
        "train-1.tar": images("train")[1::2],
        "test-0.tar": images("test"),
    }
    for name, paths in tars.items():
        members = {}
        for path in paths:
            members[path.name] = (IMAGES / path).read_bytes()
            members[f"{path.stem}.cls"] = path.parent.name.encode()
        write_tars(root, {name: members})


def parquet(root):
    root.mkdir()
    for split in ("train", "test"):
        rows = []
        for path in images(split):
            # As Hugging Face's `datasets` stores an image.
            image = {"bytes": (IMAGES / path).read_bytes(), "path": path.name}
            rows.append({"image": image, "label": path.parent.name})
        table = pa.Table.from_pylist(rows)
        # Several row groups, of which the last one is shorter.
        pq.write_table(table, root / f"{split}.parquet", row_group_size=3)


def path_table(root):
    """A file for each row: one that is in two splits is refused."""
    for split in ("train", "test"):
        shutil.copytree(IMAGES, root / split)
        lines = [f"{split}/{path},{path.parent}" for path in images(split)]
        (root / f"{split}.csv").write_text("\n".join(["image,label", *lines]) + "\n")


# kind -> (writer, source.splits)
KINDS = {
    "image_folder": (image_folder, "{train: train, test: test}"),
    "class_tars": (class_tars, "{train: train, test: test.tar}"),
    "webdataset": (webdataset_tars, '{train: "train-{0..1}.tar", test: "test-*.tar"}'),
    "parquet": (parquet, "{train: train.parquet, test: test.parquet}"),
    "path_table": (path_table, "{train: train.csv, test: test.csv}"),
}


def make_shards(source, output, *settings):
    image_corpus.make_shards(
        source,
        output,
        "source.holdout_fraction=0.0",
        # Of so few images the bad ones would be too many.
        "images.max_bad_fraction=1.0",
        # Who does a part of the work must not be seen in the result.
        "num_workers=2",
        *settings,
    )


def contents(folder):
    """What must not change: tars, fingerprints, index and the outcome of every input."""
    manifest = json.loads((folder / "manifest.json").read_text())
    tars = {}
    for path in folder.glob("*.tar"):
        tars[path.name] = blake3(path.read_bytes()).hexdigest()
    splits = {}
    for name, entry in manifest["splits"].items():
        splits[name] = entry["fingerprint"]

    index = []
    for row in pq.read_table(folder / "index.parquet").to_pylist():
        # The tars' hashes hold those of the images, which are long.
        del row["blake3"]
        index.append([str(value) for value in row.values()])

    # Sorted: the order of a ledger's rows is no promise.
    ledger = pq.read_table(folder / "ledger.parquet").to_pylist()
    columns = ("split", "path", "status", "reason")
    outcomes = [[row[name] for name in columns] for row in ledger]
    return {
        "tars": tars,
        "fingerprint": manifest["fingerprint"],
        "splits": splits,
        "classes": manifest["classes"],
        "index": index,
        "ledger": sorted(outcomes, key=lambda row: row[:2]),
        "keys": sorted(row["key"] for row in ledger if row["key"]),
    }


@every(kind=[*KINDS, "held out"])
def test_shards_keep_their_bytes(kind, golden, tmp_path):
    source = tmp_path / "in"
    shards = tmp_path / "out"
    if kind == "held out":
        image_folder(source)
        make_shards(source / "train", shards, *HELD_OUT)
    else:
        write, splits = KINDS[kind]
        write(source)
        make_shards(source, shards, f"source.kind={kind}", f"source.splits={splits}")
    golden.json(f"shards/{kind.replace(' ', '_')}.json", contents(shards))

    # Nothing was unpacked beside the output.
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out"}


@pytest.fixture(scope="module")
def shards(golden, tmp_path_factory):
    """A shard folder that was made when the golden files were last renewed."""

    def make(folder):
        source = tmp_path_factory.mktemp("source") / "in"
        image_folder(source)
        make_shards(source, folder, "source.splits={train: train, test: test}")

    stored = golden.folder("shards/folder", make)
    return Path(shutil.copytree(stored, tmp_path_factory.mktemp("golden") / "shards"))


def test_a_stored_folder_is_valid(shards):
    assert "valid" in run_script("verify_shards", shards)


def test_a_stored_folder_has_the_contents_of_a_new_one(shards, golden):
    golden.json("shards/image_folder.json", contents(shards))
