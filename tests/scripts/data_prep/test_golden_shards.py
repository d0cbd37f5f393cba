"""Shards of eight fixed images, byte for byte, from every kind of source."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import webdataset
from blake3 import blake3

from tests.support.corpora.eight_images import KINDS, image_folder
from tests.support.golden import Golden

REPOSITORY = Path(__file__).parents[3]
HELD_OUT = ("source.splits={}", "source.holdout_fraction=0.3", "shards.min_shards=2")


def script(name: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, f"data_prep/{name}.py", *map(str, arguments)],
        cwd=REPOSITORY, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def make_shards(source: Path, output: Path, *settings: str) -> str:
    return script(
        "make_shards",
        "--config=configs/data/image_folder.yaml",
        f"source.path={source}",
        f"output={output}",
        "source.holdout_fraction=0.0",
        "images.max_bad_fraction=1.0",
        "num_workers=2",
        *settings,
    )


def contents(folder: Path) -> dict[str, Any]:
    """What must not change: tars, fingerprints, index and the outcome of every input."""
    manifest = json.loads((folder / "manifest.json").read_text())
    ledger = pq.read_table(folder / "ledger.parquet").to_pylist()
    index = pq.read_table(folder / "index.parquet").to_pylist()
    outcomes = [[row[name] for name in ("split", "path", "status", "reason")] for row in ledger]
    return {
        "tars": {path.name: blake3(path.read_bytes()).hexdigest() for path in folder.glob("*.tar")},
        "fingerprint": manifest["fingerprint"],
        "splits": {name: entry["fingerprint"] for name, entry in manifest["splits"].items()},
        "classes": manifest["classes"],
        "index": [[str(value) for name, value in row.items() if name != "blake3"] for row in index],
        "ledger": sorted(outcomes, key=lambda row: row[:2]),
        "keys": sorted(row["key"] for row in ledger if row["key"]),
    }


@pytest.mark.parametrize("kind", [*KINDS, "held out"])
def test_shards_keep_their_bytes(kind: str, golden: Golden, tmp_path: Path) -> None:
    source, shards = tmp_path / "in", tmp_path / "out"
    if kind == "held out":
        image_folder(source)
        make_shards(source / "train", shards, *HELD_OUT)
    else:
        write, splits = KINDS[kind]
        write(source)
        make_shards(source, shards, f"source.kind={kind}", f"source.splits={splits}")
    golden.json(f"shards/{kind.replace(' ', '_')}.json", contents(shards))


@pytest.fixture(scope="module")
def shards(golden: Golden, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shard folder that was made when the golden files were last renewed."""

    def make(folder: Path) -> None:
        source = tmp_path_factory.mktemp("source") / "in"
        image_folder(source)
        make_shards(source, folder, "source.splits={train: train, test: test}")

    stored = golden.folder("shards/folder", make)
    return Path(shutil.copytree(stored, tmp_path_factory.mktemp("golden") / "shards"))


def test_a_stored_folder_is_valid(shards: Path) -> None:
    assert "valid" in script("verify_shards", shards)


def test_a_stored_folder_has_the_contents_of_a_new_one(shards: Path, golden: Golden) -> None:
    golden.json("shards/image_folder.json", contents(shards))


def test_a_changed_byte_is_found(shards: Path, tmp_path: Path) -> None:
    changed = Path(shutil.copytree(shards, tmp_path / "shards"))
    row = pq.read_table(changed / "index.parquet").to_pylist()[0]
    with open(changed / row["shard"], "r+b") as tar:
        tar.seek(row["offset"] + row["length"] // 2)
        byte = tar.read(1)[0]
        tar.seek(-1, 1)
        tar.write(bytes([byte ^ 1]))
    arguments = [sys.executable, "data_prep/verify_shards.py", str(changed)]
    done = subprocess.run(arguments, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 2 and row["shard"] in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("read", ["by_webdataset", "by_offset"])
def test_stock_readers_read_the_stored_folder(read: str, shards: Path) -> None:
    readers: dict[str, Callable[[Path, str], list[tuple[str, int, bytes]]]]
    readers = {"by_webdataset": by_webdataset, "by_offset": by_offset}
    for split in ("train", "test"):
        index = pq.read_table(shards / "index.parquet", filters=[("split", "==", split)])
        expected = [(row["key"], row["label"], row["blake3"]) for row in index.to_pylist()]
        found = readers[read](shards, split)
        assert [(key, label, blake3(data).digest()) for key, label, data in found] == expected


def by_webdataset(folder: Path, split: str) -> list[tuple[str, int, bytes]]:
    tars = [str(path) for path in sorted(folder.glob(f"{split}-*.tar"))]
    rows = webdataset.WebDataset(tars, shardshuffle=False)
    return [
        (row["__key__"], int(row["cls"]), next(row[name] for name in ("jpg", "png") if name in row))
        for row in rows
    ]


def by_offset(folder: Path, split: str) -> list[tuple[str, int, bytes]]:
    found = []
    for row in pq.read_table(folder / "index.parquet").to_pylist():
        if row["split"] == split:
            with open(folder / row["shard"], "rb") as tar:
                tar.seek(row["offset"])
                found.append((row["key"], row["label"], tar.read(row["length"])))
    return found
