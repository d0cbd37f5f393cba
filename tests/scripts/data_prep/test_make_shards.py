"""data_prep/make_shards.py, run as people run it."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import blake3
import pyarrow.parquet as pq
import pytest
import webdataset

from tests.support.corpora.image_corpus import (
    REPOSITORY,
    command,
    contents,
    corpus,
    encoded,
    ledger,
    make_shards,
)
from tests.support.corpora.image_samples import png
from tests.support.corpora.shard_folders import photo
from tests.support.waiting import PATIENCE_S
from vitscale.data.index import read_manifest


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Path, str]:
    """(source, shard folder, what was printed), shared by tests that only read."""
    base = tmp_path_factory.mktemp("made")
    source = corpus(base / "images")
    text = make_shards(source, base / "shards", "shards.min_shards=2")
    return source, base / "shards", text


def test_order_of_creation_does_not_change_the_shards(made, tmp_path):
    _, shards, _ = made
    other = corpus(tmp_path / "elsewhere", order_seed=5)
    command_line = command(other, tmp_path / "again", "shards.min_shards=2")
    one_core = (
        f"import os, sys; os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}}); "
    )
    code = one_core + f"os.execv(sys.executable, {command_line!r})"
    subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, check=True, capture_output=True
    )
    made_again = contents(tmp_path / "again")
    made_first = contents(shards)
    manifests = [
        json.loads(each.pop("manifest.json")) for each in (made_again, made_first)
    ]
    assert made_again == made_first
    assert manifests[0].pop("source_path") == str(other)
    assert manifests[1].pop("source_path") != str(other)
    assert manifests[0] == manifests[1]


def test_concurrent_commands_share_the_work(made, tmp_path):
    source, shards, _ = made
    running = [
        subprocess.Popen(
            command(
                source, tmp_path / "shared", "shards.min_shards=2", "launch.num_tasks=3"
            ),
            cwd=REPOSITORY,
            env=os.environ | {"SLURM_ARRAY_TASK_ID": str(task)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for task in range(3)
    ]
    texts = [process.communicate(timeout=PATIENCE_S)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], texts
    assert contents(tmp_path / "shared") == contents(shards)


def test_an_existing_output_is_recognised_or_refused(made, tmp_path):
    source, shards, text = made
    assert "24 inputs = 24 kept + 0 rejected" in text
    assert "next: vitscale pretrain" in text
    before = contents(shards)
    assert "already there" in make_shards(source, shards, "shards.min_shards=2")
    text = make_shards(source, shards, "shards.min_shards=2", "seed=1", rc=2)
    assert "other settings: seed" in text
    assert "next:" in text
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("keep")
    assert "was not made by this script" in make_shards(source, tmp_path / "full", rc=2)
    assert "(Not a directory)" in make_shards(
        source, tmp_path / "full/mine.txt/x", rc=74
    )
    assert contents(shards) == before
    assert contents(tmp_path / "full") == {"mine.txt": b"keep"}


def plant_faults(root: Path) -> dict[str, str | None]:
    """Put one of each trouble into the corpus; returns path -> expected reason (None: kept)."""
    cat = root / "cat"
    seeds = iter(range(1000, 2000))

    def good(format: str = "JPEG") -> bytes:
        return encoded(format, seed=next(seeds))

    files = {
        "zero.jpg": (b"", "empty"),
        "page.jpg": (b"<!DOCTYPE html><html><body>404</body></html>", "not_an_image"),
        "cut.jpg": (encoded("JPEG", seed=1, side=64)[:-1500], "bad_pixels"),
        "bomb.png": (png(60_000, 60_000, rows=bytes(1000)), "too_many_pixels"),
        "really_png.jpg": (good("PNG"), None),
        "猫 ünï.jpg": (good(), None),
        "new\nline.jpg": (good(), None),
        "a.b.c.jpg": (good(), None),
        "x" * 251 + ".jpg": (good(), None),
        "twin.jpg": (good(), None),
        "twin.png": (good("PNG"), None),
        "UPPER.JPEG": (good(), None),
        "deep/er/inside.png": (good("PNG"), None),
        ".DS_Store": (b"x", "hidden"),
        ".git/a.jpg": (good(), "hidden"),
        "notes.txt": (b"x", "other_name"),
    }
    for name, (data, _) in files.items():
        (cat / name).parent.mkdir(parents=True, exist_ok=True)
        (cat / name).write_bytes(data)
    with open(os.fsencode(cat) + b"/bytes\xff.jpg", "wb") as file:
        file.write(good())
    (root / "loose.jpg").write_bytes(good())
    secret = root.parent / "secret.jpg"
    secret.write_bytes(good())
    (cat / "outside.jpg").symlink_to(secret)
    (cat / "outside_folder").symlink_to("/usr")
    (cat / "loop").symlink_to(cat)
    (cat / "nowhere.jpg").symlink_to("nothing.jpg")
    (cat / "inside.jpg").symlink_to(root / "dog" / "000.jpg")  # one image, two classes
    os.mkfifo(cat / "pipe.jpg")
    expected = {f"cat/{name}": reason for name, (_, reason) in files.items()}
    return expected | {
        "cat/bytes\\xff.jpg": None,
        "loose.jpg": "no_class",
        "cat/outside.jpg": None,
        "cat/outside_folder": "linked_folder",
        "cat/loop": "linked_folder",
        "cat/nowhere.jpg": "link_broken",
        "cat/inside.jpg": "duplicate_path",
        "dog/000.jpg": "duplicate_path",
        "cat/pipe.jpg": "not_a_file",
    }


def test_every_planted_fault_is_in_the_ledger_with_its_reason(tmp_path):
    source = corpus(tmp_path / "images")
    good = {str(path.relative_to(source)): None for path in source.rglob("*.*")}
    expected = good | plant_faults(source)
    options = ("images.max_bad_fraction=0.5", "source.holdout_fraction=0.0")
    text = make_shards(source, tmp_path / "shards", *options)
    rows = ledger(tmp_path / "shards")

    # A ledger has no control characters.
    expected = {
        path.replace("\n", r"\x0a"): reason for path, reason in expected.items()
    }
    assert {path: row["reason"] for path, row in rows.items()} == expected
    kept = {path for path, row in rows.items() if row["status"] == "kept"}
    assert kept == {path for path, reason in expected.items() if reason is None}
    assert (
        f"{len(rows)} inputs = {len(kept)} kept + {len(rows) - len(kept)} rejected"
        in text
    )
    index = {
        r["key"]: r
        for r in pq.read_table(tmp_path / "shards/index.parquet").to_pylist()
    }
    assert index.keys() == {rows[path]["key"] for path in kept}
    assert len(index) == len(kept)
    assert index[rows["cat/really_png.jpg"]["key"]]["format"] == "png"
    for row in index.values():
        tar = (tmp_path / "shards" / row["shard"]).read_bytes()
        image = tar[row["offset"] : row["offset"] + row["length"]]
        assert blake3.blake3(image).digest() == row["blake3"]
    stream = webdataset.WebDataset(
        str(tmp_path / "shards/train-000000.tar"), shardshuffle=False
    )
    assert {sample["__key__"] for sample in stream} == index.keys()


def make(source: Path, output: Path, *options: str, rc: int = 0) -> str:
    return make_shards(source, output, "source.holdout_fraction=0.0", *options, rc=rc)


def test_small_classes_leave_and_every_class_holds_out_the_same(tmp_path):
    root = tmp_path / "images"
    for name, num in (("cat", 12), ("dog", 3), ("rare", 2)):
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
    assert "17 inputs = 15 kept + 2 rejected" in text
    kept = [row for row in rows.values() if row["status"] == "kept"]
    assert Counter((row["split"], row["class"]) for row in kept) == {
        ("val", "cat"): 4,
        ("val", "dog"): 2,  # never the whole class
        ("train", "cat"): 8,
        ("train", "dog"): 1,
    }
    make(root, tmp_path / "again", *options, "num_workers=1")
    assert contents(tmp_path / "again") == contents(tmp_path / "shards")


def test_a_small_corpus_needs_one_start_of_python(tmp_path):
    """Workers are forks of the command, which imports neither torch nor pandas."""
    source = corpus(tmp_path / "images", num=12)
    done = subprocess.run(
        command(source, tmp_path / "shards", "num_workers=2"),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPROFILEIMPORTTIME": "1"},
    )
    assert done.returncode == 0
    imported = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines()]
    assert imported.count("numpy") == 1
    assert not {"pandas._libs", "torch._C"} & set(imported)
