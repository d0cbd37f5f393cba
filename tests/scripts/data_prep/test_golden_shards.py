"""Shards of eight fixed images, byte for byte, from every kind of source."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
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
    # Nothing was unpacked beside the output.
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out"}


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
