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
from tests.support.golden import FOLDER, Golden
from tests.support.tables import Values, every

HELD_OUT = ("source.splits={}", "source.holdout_fraction=0.3", "shards.min_shards=2")
IMAGES = FOLDER / "images"


def images(split: str) -> list[Path]:
    """Paths as CLASS/NAME below IMAGES."""
    paths = sorted(path.relative_to(IMAGES) for path in IMAGES.glob("*/*"))
    return paths if split == "train" else paths[::2]


def image_folder(root: Path) -> None:
    for split in ("train", "test"):
        for path in images(split):
            (root / split / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(IMAGES / path, root / split / path)


def class_tars(root: Path) -> None:
    """A folder of tars for train, one tar of them for test."""
    for split in ("train", "test"):
        tars = {
            f"{name}.tar": {
                path.name: (IMAGES / path).read_bytes()
                for path in images(split)
                if path.parent.name == name
            }
            for name in ("cat", "dog")
        }
        if split == "train":
            write_tars(root / split, tars)
        else:
            write_tars(
                root, {"test.tar": {name: tar_bytes(tar) for name, tar in tars.items()}}
            )


def webdataset_tars(root: Path) -> None:
    for split, number in (("train", 0), ("train", 1), ("test", 0)):
        members = {}
        for path in images(split)[number :: 2 if split == "train" else 1]:
            members[f"{path.stem}{path.suffix}"] = (IMAGES / path).read_bytes()
            members[f"{path.stem}.cls"] = path.parent.name.encode()
        write_tars(root, {f"{split}-{number}.tar": members})


def parquet(root: Path) -> None:
    root.mkdir()
    for split in ("train", "test"):
        rows = [
            {
                "image": {"bytes": (IMAGES / path).read_bytes(), "path": path.name},
                "label": path.parent.name,
            }
            for path in images(split)
        ]
        pq.write_table(
            pa.Table.from_pylist(rows), root / f"{split}.parquet", row_group_size=3
        )


def path_table(root: Path) -> None:
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


def make_shards(source: Path, output: Path, *settings: str) -> None:
    common = (
        "source.holdout_fraction=0.0",
        "images.max_bad_fraction=1.0",
        "num_workers=2",
    )
    image_corpus.make_shards(source, output, *common, *settings)


def contents(folder: Path) -> Values:
    """What must not change: tars, fingerprints, index and the outcome of every input."""
    manifest = json.loads((folder / "manifest.json").read_text())
    ledger = pq.read_table(folder / "ledger.parquet").to_pylist()
    index = pq.read_table(folder / "index.parquet").to_pylist()
    outcomes = [
        [row[name] for name in "split path status reason".split()] for row in ledger
    ]
    return {
        "tars": {
            path.name: blake3(path.read_bytes()).hexdigest()
            for path in folder.glob("*.tar")
        },
        "fingerprint": manifest["fingerprint"],
        "splits": {
            name: entry["fingerprint"] for name, entry in manifest["splits"].items()
        },
        "classes": manifest["classes"],
        "index": [
            [str(value) for name, value in row.items() if name != "blake3"]
            for row in index
        ],
        "ledger": sorted(outcomes, key=lambda row: row[:2]),
        "keys": sorted(row["key"] for row in ledger if row["key"]),
    }


@every(kind=[*KINDS, "held out"])
def test_shards_keep_their_bytes(kind, golden: Golden, tmp_path):
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
def shards(golden: Golden, tmp_path_factory) -> Path:
    """A shard folder that was made when the golden files were last renewed."""

    def make(folder: Path) -> None:
        source = tmp_path_factory.mktemp("source") / "in"
        image_folder(source)
        make_shards(source, folder, "source.splits={train: train, test: test}")

    stored = golden.folder("shards/folder", make)
    return Path(shutil.copytree(stored, tmp_path_factory.mktemp("golden") / "shards"))


def test_a_stored_folder_is_valid(shards):
    assert "valid" in run_script("verify_shards", shards)


def test_a_stored_folder_has_the_contents_of_a_new_one(shards, golden: Golden):
    golden.json("shards/image_folder.json", contents(shards))
