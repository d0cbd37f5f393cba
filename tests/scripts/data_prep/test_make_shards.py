"""data_prep/make_shards.py, run as people run it."""

import json
import os
import subprocess
from collections import Counter

import blake3
import pyarrow.parquet as pq
import pytest
import webdataset
import yaml

from tests.support.corpora.image_corpus import (
    command,
    contents,
    corpus,
    encoded,
    ledger,
    make_shards,
)
from tests.support.corpora.image_samples import png
from tests.support.corpora.shard_folders import photo
from tests.support.corpora.sources import written
from tests.support.waiting import PATIENCE_S, ROOT, run_python
from vitscale.data.index import read_manifest


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(source, shard folder, what was printed), shared by tests that only read."""
    base = tmp_path_factory.mktemp("made")
    source = corpus(base / "images")
    text = make_shards(source, base / "shards", "shards.min_shards=2")
    return source, base / "shards", text


def test_order_of_creation_does_not_change_the_shards(made, tmp_path):
    _, shards, _ = made
    other = corpus(tmp_path / "elsewhere", order_seed=5)
    # On one core, so with another number of workers, too.
    core = min(os.sched_getaffinity(0))
    words = command(other, tmp_path / "again", "shards.min_shards=2")
    code = (
        f"import os, sys; os.sched_setaffinity(0, {{{core}}}); "
        f"os.execv(sys.executable, {words!r})"
    )
    run_python("-c", code, cwd=ROOT, check=True)

    # All files are equal byte by byte; only the manifest names the source, which is another folder.
    again = contents(tmp_path / "again")
    first = contents(shards)
    again_manifest = json.loads(again.pop("manifest.json"))
    first_manifest = json.loads(first.pop("manifest.json"))
    assert again == first
    assert again_manifest.pop("source_path") == str(other)
    assert first_manifest.pop("source_path") != str(other)
    assert again_manifest == first_manifest


def test_concurrent_commands_share_the_work(made, tmp_path):
    source, shards, _ = made
    shared = tmp_path / "shared"
    words = command(source, shared, "shards.min_shards=2", "launch.num_tasks=3")
    # As the tasks of an array of SLURM, on nodes that have the folder in common.
    tasks = []
    for number in range(3):
        task = subprocess.Popen(
            words,
            cwd=ROOT,
            env=os.environ | {"SLURM_ARRAY_TASK_ID": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        tasks.append(task)
    texts = [task.communicate(timeout=PATIENCE_S)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0, 0], texts
    assert contents(shared) == contents(shards)


def test_an_existing_output_is_recognised_or_refused(made, tmp_path):
    source, shards, text = made
    assert "24 inputs = 24 kept + 0 rejected" in text
    assert "next: vitscale pretrain" in text
    before = contents(shards)
    assert "already there" in make_shards(source, shards, "shards.min_shards=2")
    text = make_shards(source, shards, "shards.min_shards=2", "seed=1", rc=2)
    assert "other settings: seed" in text
    assert "next:" in text

    # A folder of somebody else's files, and a path that no folder can have.
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine.txt").write_text("keep")
    assert "was not made by this script" in make_shards(source, full, rc=2)
    assert "(Not a directory)" in make_shards(source, full / "mine.txt/x", rc=74)
    assert contents(shards) == before
    assert contents(full) == {"mine.txt": b"keep"}


def plant_faults(root):
    """Put one of each trouble into the corpus; returns path -> expected reason (None: kept)."""
    cat = root / "cat"
    seeds = iter(range(1000, 2000))

    def good(format="JPEG"):
        # Always another image: equal ones would be told of as such.
        return encoded(format, seed=next(seeds))

    # Names that are odd and good, and names that are not meant.
    reasons = yaml.safe_load(r"""
    really_png.jpg: null
    猫 ünï.jpg: null
    "new\nline.jpg": null
    a.b.c.jpg: null
    twin.jpg: null
    twin.png: null
    UPPER.JPEG: null
    deep/er/inside.png: null
    .DS_Store: hidden
    .git/a.jpg: hidden
    notes.txt: other_name
    """)
    reasons["x" * 251 + ".jpg"] = None
    files = {}
    for name, reason in reasons.items():
        format = "PNG" if "png" in name else "JPEG"
        files[name] = (good(format), reason)

    # Content that is bad.
    files |= {
        "zero.jpg": (b"", "empty"),
        "page.jpg": (b"<!DOCTYPE html><html><body>404</body></html>", "not_an_image"),
        "cut.jpg": (encoded("JPEG", seed=1, side=64)[:-1500], "bad_pixels"),
        "bomb.png": (png(60_000, 60_000, rows=bytes(1000)), "too_many_pixels"),
    }
    for name, (data, _) in files.items():
        written(cat / name, data)
    # A name that is not UTF-8, as from an old archive.
    written(cat / os.fsdecode(b"bytes\xff.jpg"), good())
    written(root / "loose.jpg", good())

    # Links: to a file outside, which counts; to folders, which could go in circles; to nothing; and
    # to an image of another class. A pipe would be read for ever.
    secret = written(root.parent / "secret.jpg", good())
    (cat / "outside.jpg").symlink_to(secret)
    (cat / "outside_folder").symlink_to("/usr")
    (cat / "loop").symlink_to(cat)
    (cat / "nowhere.jpg").symlink_to("nothing.jpg")
    (cat / "inside.jpg").symlink_to(root / "dog" / "000.jpg")  # one image, two classes
    os.mkfifo(cat / "pipe.jpg")
    expected = {f"cat/{name}": reason for name, (_, reason) in files.items()}
    return expected | yaml.safe_load(r"""
    cat/bytes\xff.jpg: null
    loose.jpg: no_class
    cat/outside.jpg: null
    cat/outside_folder: linked_folder
    cat/loop: linked_folder
    cat/nowhere.jpg: link_broken
    cat/inside.jpg: duplicate_path
    dog/000.jpg: duplicate_path
    cat/pipe.jpg: not_a_file
    """)


def test_every_planted_fault_is_in_the_ledger_with_its_reason(tmp_path):
    source = corpus(tmp_path / "images")
    shards = tmp_path / "shards"
    good = {str(path.relative_to(source)): None for path in source.rglob("*.*")}
    expected = good | plant_faults(source)
    text = make(source, shards, "images.max_bad_fraction=0.5")
    rows = ledger(shards)

    # A ledger has no control characters.
    expected = {
        path.replace("\n", r"\x0a"): reason for path, reason in expected.items()
    }
    assert {path: row["reason"] for path, row in rows.items()} == expected
    kept = {path for path, row in rows.items() if row["status"] == "kept"}
    assert kept == {path for path, reason in expected.items() if reason is None}
    num = len(rows)
    num_kept = len(kept)
    assert f"{num} inputs = {num_kept} kept + {num - num_kept} rejected" in text

    # Ledger, index and tar name the same samples; a key that two share would be missing here.
    table = pq.read_table(shards / "index.parquet").to_pylist()
    index = {row["key"]: row for row in table}
    assert index.keys() == {rows[path]["key"] for path in kept}
    assert len(index) == num_kept
    # By its content: readers choose a decoder by the suffix in the tar.
    assert index[rows["cat/really_png.jpg"]["key"]]["format"] == "png"
    for row in table:
        tar = (shards / row["shard"]).read_bytes()
        start = row["offset"]
        image = tar[start : start + row["length"]]
        assert blake3.blake3(image).digest() == row["blake3"]
    url = str(shards / "train-000000.tar")
    stream = webdataset.WebDataset(url, shardshuffle=False)
    assert {sample["__key__"] for sample in stream} == index.keys()


def make(source, output, *options):
    return make_shards(source, output, "source.holdout_fraction=0.0", *options)


def test_small_classes_leave_and_every_class_holds_out_the_same(tmp_path):
    root = tmp_path / "images"
    # One with more than it must hold out, one with just enough images to stay, one with too few.
    for name, num in (("cat", 12), ("dog", 3), ("rare", 2)):
        for i in range(num):
            written(root / name / f"{i:02d}.jpg", photo(100 * num + i))
    shards = tmp_path / "shards"
    options = (
        "source.min_images_per_class=3",
        "source.val_per_class=4",
        "source.holdout_split=val",
    )
    text = make(root, shards, *options)
    rows = ledger(shards)
    small = {path for path, row in rows.items() if row["reason"] == "small_class"}
    assert small == {"rare/00.jpg", "rare/01.jpg"}
    # No label is left for it, which a model would have an output for.
    assert read_manifest(shards).classes == ("cat", "dog")
    assert "17 inputs = 15 kept + 2 rejected" in text
    kept = [row for row in rows.values() if row["status"] == "kept"]
    # Never the whole class.
    counts = Counter(f"{row['split']} {row['class']}" for row in kept)
    assert counts == {"val cat": 4, "val dog": 2, "train cat": 8, "train dog": 1}
    # Who does a part of the work must not decide what is held out.
    make(root, tmp_path / "again", *options, "num_workers=1")
    assert contents(tmp_path / "again") == contents(shards)


def test_a_small_corpus_needs_one_start_of_python(tmp_path):
    """Workers are forks of the command, which imports neither torch nor pandas."""
    source = corpus(tmp_path / "images", num=12)
    _, *words = command(source, tmp_path / "shards", "num_workers=2")
    # Python then writes a line to stderr for each import, in every process.
    told = os.environ | {"PYTHONPROFILEIMPORTTIME": "1"}
    done = run_python(*words, cwd=ROOT, env=told)
    assert done.returncode == 0
    imported = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines()]
    # Once: a worker that starts afresh would import it again.
    assert imported.count("numpy") == 1
    assert not {"pandas._libs", "torch._C"} & set(imported)
