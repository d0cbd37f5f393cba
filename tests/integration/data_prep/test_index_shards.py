"""data_prep/index_shards.py on the tar layouts of other projects."""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import io
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from PIL import Image

from data_prep.indexing import folder as index_folder
from data_prep.indexing import remote as remote_indexing
from tests.support.corpora.external_tars import (
    hugging_face_layout,
    imagenet_22k_layout,
    img2dataset_layout,
    photo,
    write_tar,
)
from tests.support.corpora.small_shards import make_shard_folder
from tests.support.range_server import served
from tests.support.ranks.rank_processes import ROOT
from vitscale.data.index import read_manifest, read_split
from vitscale.data.index_keys import sample_keys
from vitscale.data.label_spaces import known_space
from vitscale.data.samples import SplitReader

SCRIPT = ROOT / "data_prep/index_shards.py"
VERIFY = ROOT / "data_prep/verify_shards.py"


def run(script: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a script in this process, because starting one takes longer than its work."""
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", [str(script), *map(str, arguments)])
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as stop:
            code = stop.code or 0
    assert isinstance(code, int)
    return subprocess.CompletedProcess([], code, out.getvalue(), err.getvalue())


def index_command(source: object, output: Path, *overrides: str) -> list[object]:
    config = ROOT / "configs/data/index_shards.yaml"
    return ["--config", config, f"source.path={source}", f"output={output}", *overrides]


def run_index(
    source: Path | str, output: Path, *overrides: str
) -> subprocess.CompletedProcess[str]:
    return run(SCRIPT, *index_command(source, output, *overrides))


def index(source: object, output: Path, *overrides: str) -> str:
    finished = run_index(source, output, *overrides)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def verify(folder: Path) -> None:
    finished = run(VERIFY, folder)
    assert finished.returncode == 0, finished.stdout + finished.stderr


def samples(folder: Path, split: str) -> dict[str, tuple[bytes, str]]:
    """key -> (image, class), read by the training loader."""
    entries = read_split(folder, split=split)
    found = {}
    for i, key in enumerate(sample_keys(entries, range(entries.num_samples))):
        path = entries.shard_paths[entries.shard_of[i]]
        with open(path, "rb") as file:
            file.seek(entries.offset[i])
            image = file.read(entries.length[i])
        found[key] = (image, entries.classes[entries.label[i]])
    return found


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def ledger(folder: Path) -> list[dict[str, Any]]:
    return pq.read_table(folder / "ledger.parquet").to_pylist()


def test_img2dataset_layout(tmp_path: Path) -> None:
    stored = img2dataset_layout(tmp_path / "tars", tars=3, samples=10)
    before = contents(tmp_path / "tars")
    printed = index(tmp_path / "tars", tmp_path / "index", "source.label=json:synset")
    assert "30 inputs = 24 kept + 6 rejected" in printed
    assert samples(tmp_path / "index", "train") == stored
    assert Counter(row["reason"] for row in ledger(tmp_path / "index")) == {
        None: 24,
        "other_name": 6,
    }
    assert contents(tmp_path / "tars") == before, "the tars are left as they were"
    verify(tmp_path / "index")
    assert "already there" in index(
        tmp_path / "tars", tmp_path / "index", "source.label=json:synset"
    )
    other = run_index(tmp_path / "tars", tmp_path / "index", "source.label=json:caption")
    assert other.returncode == 2 and "exists already" in other.stderr


def test_imagenet_22k_layout_with_both_label_spaces(tmp_path: Path) -> None:
    tars = tmp_path / "tars"
    rows = list(imagenet_22k_layout(tars, splits={"train": 3, "validation": 1}, samples=6))
    splits = (
        'source.splits={train: "imagenet22k-train-{0000..0002}.tar", '
        'val: "imagenet22k-validation-*.tar"}'
    )
    fixed = [splits, "labels.values=index"]
    index(tars, tmp_path / "22k", *fixed, "labels.space=imagenet_22k")
    more = ["labels.space=imagenet_12k", "source.label=json:label_12k", "labels.unknown=reject"]
    index(tars, tmp_path / "12k", *fixed, *more)
    spaces = {"22k": known_space("imagenet_22k"), "12k": known_space("imagenet_12k")}
    for split, name in (("train", "train"), ("validation", "val")):
        wide = {key: (image, spaces["22k"][y]) for s, key, image, y, _ in rows if s == split}
        assert samples(tmp_path / "22k", name) == wide
        narrow = {k: (i, spaces["12k"][z]) for s, k, i, _, z in rows if s == split and z >= 0}
        assert samples(tmp_path / "12k", name) == narrow
    assert [len(read_manifest(tmp_path / name).classes) for name in spaces] == [21_841, 11_821]
    rejected = [row for row in ledger(tmp_path / "12k") if row["status"] == "rejected"]
    assert {(row["reason"], row["class"]) for row in rejected} == {("unknown_class", "-1")}
    verify(tmp_path / "22k")
    verify(tmp_path / "12k")


def test_hugging_face_layout_with_named_labels(tmp_path: Path) -> None:
    stored = hugging_face_layout(tmp_path / "repo", tars=2, samples=6)
    index(tmp_path / "repo/data", tmp_path / "index", "source.splits={train: train}")
    assert samples(tmp_path / "index", "train") == stored
    names = [shard.name for shard in read_manifest(tmp_path / "index").splits["train"].shards]
    assert names == ["train/0000.tar", "train/0001.tar"]


def test_indexing_our_shards_reproduces_their_index(tmp_path: Path) -> None:
    made = make_shard_folder(tmp_path / "shards", lengths={"train": (13, 12)}, rejected=())
    (tmp_path / "classes.txt").write_text("\n".join(made.classes))
    space = [f"labels.space={tmp_path / 'classes.txt'}", "labels.values=index"]
    index(tmp_path / "shards", tmp_path / "index", *space)
    found = read_manifest(tmp_path / "index")
    assert found.fingerprint == made.fingerprint
    assert found.splits["train"].shards == made.splits["train"].shards
    old, new = (pq.read_table(tmp_path / name / "index.parquet") for name in ("shards", "index"))
    assert old.to_pylist() == new.to_pylist()


def test_labels_without_a_space_keep_their_numbers(tmp_path: Path) -> None:
    rows = [{"__key__": f"k{i}", "jpg": photo(i), "cls": label} for i, label in enumerate([2, 10])]
    write_tar(tmp_path / "tars/a.tar", rows)
    index(tmp_path / "tars", tmp_path / "index")
    assert read_split(tmp_path / "index", split="train").label.tolist() == [2, 10]
    assert len(read_manifest(tmp_path / "index").classes) == 11


def test_tars_of_images_alone_give_an_index_without_labels(tmp_path: Path) -> None:
    rows = [{"__key__": f"k{i}", "jpg": photo(i)} for i in range(3)]
    write_tar(tmp_path / "tars/a.tar", [*rows, {"__key__": "k3", "jpg": photo(3), "cls": 7}])
    text = index(tmp_path / "tars", tmp_path / "index", "labels.values=none")
    assert "no labels" in text and "configs/mae/b16.yaml" in text
    assert read_split(tmp_path / "index", split="train").label.tolist() == [-1] * 4
    assert read_manifest(tmp_path / "index").classes == ()
    assert {row["class"] for row in ledger(tmp_path / "index")} == {None}
    verify(tmp_path / "index")


def test_unusable_inputs_are_in_the_ledger(tmp_path: Path) -> None:
    good = [{"__key__": f"good{i}", "jpg": photo(i), "cls": 0} for i in range(40)]
    bad = [
        {"__key__": "packed", "jpg": gzip.compress(photo(1)), "cls": 0},
        {"__key__": "text", "jpg": b"<html>", "cls": 0},
        {"__key__": "cut", "jpg": photo(1)[:-200], "cls": 0},
        {"__key__": "unlabelled", "jpg": photo(1), "txt": "a cat"},
        {"__key__": "imageless", "cls": 0},
    ]
    write_tar(tmp_path / "tars/a.tar", good + bad)
    write_tar(tmp_path / "tars/b.tar", good[:3])
    data = (tmp_path / "tars/b.tar").read_bytes()
    (tmp_path / "tars/b.tar").write_bytes(data[: 3 * 2048 + 100])
    refused = run_index(tmp_path / "tars", tmp_path / "index")
    assert refused.returncode == 2 and "images are bad" in refused.stderr
    assert not (tmp_path / "index").exists()
    index(tmp_path / "tars", tmp_path / "index", "images.max_bad_fraction=0.3")
    rows = ledger(tmp_path / "index")
    reasons = {row["path"].split("/", 1)[-1]: row["reason"] for row in rows if row["reason"]}
    assert reasons["packed.jpg"] == "packed"
    assert reasons["text.jpg"] == "not_an_image"
    assert reasons["cut.jpg"] == "bad_pixels"
    assert reasons["unlabelled.jpg"] == "no_label"
    assert reasons["imageless.cls"] == "no_image"
    assert reasons["b.tar"] == "truncated_tar"
    assert len(samples(tmp_path / "index", "train")) == 40
    # The tar was truncated before indexing, so it still equals its index.
    verify(tmp_path / "index")
    with open(tmp_path / "tars/b.tar", "r+b") as file:
        file.truncate(3 * 2048)
    finished = run(VERIFY, tmp_path / "index")
    assert finished.returncode == 2 and "b.tar: content differs" in finished.stdout


def test_images_are_never_converted(tmp_path: Path) -> None:
    cmyk, turned = io.BytesIO(), io.BytesIO()
    Image.new("CMYK", (30, 20)).save(cmyk, format="JPEG")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (30, 20)).save(turned, format="JPEG", exif=exif)
    images = [cmyk.getvalue(), turned.getvalue()]
    rows = [{"__key__": f"k{i}", "jpg": image, "cls": i} for i, image in enumerate(images)]
    write_tar(tmp_path / "tars/a.tar", rows)
    index(tmp_path / "tars", tmp_path / "index", "images.check=decode")
    assert [image for image, _ in samples(tmp_path / "index", "train").values()] == images
    verify(tmp_path / "index")


def test_the_path_of_the_tars_is_relative_if_movable(tmp_path: Path) -> None:
    hugging_face_layout(tmp_path / "here/tars", tars=1, samples=6)
    tars = tmp_path / "here/tars/data/train"
    index(tars, tmp_path / "here/index")
    index(tars, tmp_path / "elsewhere/index")
    assert read_manifest(tmp_path / "here/index").shards_root == "../tars/data/train"
    assert read_manifest(tmp_path / "elsewhere/index").shards_root == str(tars)
    shutil.move(tmp_path / "elsewhere/index", tmp_path / "index")
    assert len(samples(tmp_path / "index", "train")) == 6
    shutil.move(tmp_path / "here", tmp_path / "there")
    assert len(samples(tmp_path / "there/index", "train")) == 6
    finished = run(VERIFY, tmp_path / "index")
    assert finished.returncode == 2 and "cannot be read" in finished.stdout


def test_tars_in_a_read_only_folder(tmp_path: Path) -> None:
    stored = hugging_face_layout(tmp_path / "repo", tars=1, samples=6)
    folder = tmp_path / "repo/data/train"
    for path in (*folder.iterdir(), folder):
        path.chmod(0o555 if path.is_dir() else 0o444)
    times = {path: path.stat().st_mtime_ns for path in (folder, *folder.iterdir())}
    try:
        index(folder, tmp_path / "index")
        assert samples(tmp_path / "index", "train") == stored
        assert times == {path: path.stat().st_mtime_ns for path in times}
    finally:
        folder.chmod(0o755)


@pytest.mark.parametrize(
    "overrides, messages",
    [
        (["source.holdout_fraction=0.1"], ["source.holdout_fraction: requires rewriting the tars"]),
        (
            ["images.short_side=256", "selection.min_images_per_class=2"],
            ["images.short_side: requires rewriting the tars", "selection: requires rewriting"],
        ),
        (["source.kind=image_folder"], ["source.kind: must be webdataset"]),
        (["source.label=txt"], ["is not a label of a WebDataset"]),
        (
            ["labels.space=imagenet_1k"],
            ["3 classes of the source (6 images) are not among the 1,000", "0 match"],
        ),
    ],
)
def test_settings_that_rewrite_tars_are_refused(
    tmp_path: Path, overrides: list[str], messages: list[str]
) -> None:
    hugging_face_layout(tmp_path / "repo", tars=1, samples=6)
    finished = run_index(tmp_path / "repo/data/train", tmp_path / "index", *overrides)
    assert finished.returncode == 2, finished.stdout + finished.stderr
    for message in messages:
        assert message in finished.stderr
    assert "Traceback" not in finished.stderr
    assert not (tmp_path / "index").exists()


def test_a_killed_run_resumes_with_the_next_tar(tmp_path: Path) -> None:
    images = [photo(i) for i in range(20)]
    for number in range(20):
        rows = [
            {"__key__": f"{number}_{i}", "jpg": images[i % 20], "cls": i % 3} for i in range(150)
        ]
        write_tar(tmp_path / f"tars/{number:02d}.tar", rows)
    index(tmp_path / "tars", tmp_path / "undisturbed", "num_workers=1")
    command = index_command(tmp_path / "tars", tmp_path / "index", "num_workers=1")
    work = tmp_path / ".index.preparing"
    process = subprocess.Popen([sys.executable, SCRIPT, *map(str, command)])
    while not (work / "000003.json").exists():
        assert process.poll() is None, "ended too early"
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "index").exists()
    # Marks in the results: reading a tar again removes its mark.
    for number in (1, 2):
        path = work / f"{number:06d}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"blake3": "mark"}))
    # A tar that changed after it was read is read again.
    os.utime(tmp_path / "tars/00.tar", ns=(1, 1))
    index(tmp_path / "tars", tmp_path / "index", "num_workers=1")
    assert not work.exists()
    hashes = [
        [shard.blake3 for shard in read_manifest(tmp_path / name).splits["train"].shards]
        for name in ("undisturbed", "index")
    ]
    assert hashes[1] == [hashes[0][0], "mark", *hashes[0][2:]]
    for name in ("index.parquet", "ledger.parquet", "_info.json"):
        one, other = ((tmp_path / f / name).read_bytes() for f in ("undisturbed", "index"))
        assert one == other


def test_rows_of_other_settings_are_not_reused(tmp_path: Path) -> None:
    hugging_face_layout(tmp_path / "repo", tars=2, samples=6)
    tars, output = tmp_path / "repo/data/train", tmp_path / "index"
    # Refused at the end: all tars are indexed, and nothing is committed.
    assert run_index(tars, output, "labels.space=imagenet_1k").returncode == 2
    assert len(list((tmp_path / ".index.preparing").glob("*.arrow"))) == 3, "tars and their folder"
    index(tars, output)
    assert len(samples(output, "train")) == 12


def test_concurrent_runs_exclude_each_other(tmp_path: Path) -> None:
    hugging_face_layout(tmp_path / "repo", tars=1, samples=6)
    (tmp_path / ".index.preparing").mkdir()
    with open(tmp_path / ".index.preparing/.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        finished = run_index(tmp_path / "repo/data/train", tmp_path / "index")
    assert finished.returncode == 2 and "another process is writing" in finished.stderr


def test_number_of_workers_does_not_matter(tmp_path: Path) -> None:
    hugging_face_layout(tmp_path / "repo", tars=4, samples=6)
    for num in (1, 2):
        index(tmp_path / "repo/data/train", tmp_path / f"index{num}", f"num_workers={num}")
    assert contents(tmp_path / "index1") == contents(tmp_path / "index2")
    assert os.listdir(tmp_path / "index1") == os.listdir(tmp_path / "index2")


def test_a_missing_or_changed_label_map_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = tmp_path / "tars", tmp_path / "index"
    pets = [{"__key__": name, "jpg": photo(0), "cls": name} for name in ("cat", "dog")]
    write_tar(source / "a.tar", pets)
    label_map = tmp_path / "map.csv"
    label_map.write_text("cat,one\ndog,two\n")
    own = index_folder.write_info

    def edit(*arguments: Any, **named: Any) -> None:
        label_map.write_text("cat,two\ndog,one\n")
        own(*arguments, **named)

    setting = f"labels.map={label_map}"
    with monkeypatch.context() as patch:
        patch.setattr(index_folder, "write_info", edit)
        finished = run_index(source, output, setting)
    assert finished.returncode == 2 and "labels.map_blake3: changed while" in finished.stderr
    assert not output.exists()
    index(source, output, setting)
    assert read_manifest(output).classes == ("one", "two")
    assert "already there" in index(source, output, setting)
    label_map.unlink()
    finished = run_index(source, output, setting)
    assert finished.returncode == 2 and "map.csv' cannot be read" in finished.stderr
    assert "remove this folder" not in finished.stderr


def test_a_late_run_finds_the_finished_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = tmp_path / "tars", tmp_path / "index"
    write_tar(source / "a.tar", [{"__key__": "a", "jpg": photo(0), "cls": "0"}])
    index(source, output)
    before = contents(output)
    own, asked = os.path.lexists, []

    def not_at_first(path: Any) -> bool:
        if Path(path) != output:
            return own(path)
        asked.append(path)
        return len(asked) > 1 and own(path)

    monkeypatch.setattr(os.path, "lexists", not_at_first)
    assert "already there" in index(source, output)
    assert len(asked) == 2 and contents(output) == before
    assert sorted(os.listdir(tmp_path)) == ["index", "tars"]


def test_tars_at_a_url_are_indexed_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outage loses no tar; nothing is copied; the index equals the local one."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(remote_indexing, "CHUNK_BYTES", 5000)
    hugging_face_layout(tmp_path / "repo", tars=4, samples=6)
    tars = tmp_path / "repo/data/train"
    names = sorted(path.name for path in tars.glob("*.tar"))
    index(tars, tmp_path / "local", "source.splits={train: '*.tar'}")
    with served(tars) as server:
        splits = f"source.splits={{train: '{{{','.join(names)}}}'}}"
        server.fault = lambda path, number: "forbidden" if path == names[2] and number > 2 else None
        failed = run_index(server.url, tmp_path / "index", splits, "num_workers=1")
        assert failed.returncode == 2 and f"{names[2]}: cannot be read" in failed.stderr
        work = tmp_path / ".index.preparing"
        assert len(list(work.glob("*.arrow"))) == 2 and not list(work.rglob("*.tar"))
        server.fault = lambda path, number: None
        server.requests.clear()
        index(server.url, tmp_path / "index", splits)
        # Only the sizes of what was done before.
        assert server.requests[names[0]] == server.requests[names[1]] < server.requests[names[3]]
        found, local = (read_manifest(tmp_path / name) for name in ("index", "local"))
        assert found.splits == local.splits and found.shards_root == server.url
        assert found.index_blake3 == local.index_blake3
        entries = read_split(str(tmp_path / "index"), split="train")
        first = SplitReader(read_split(tmp_path / "local", split="train")).bytes_of(3)
        assert SplitReader(entries).bytes_of(3) == first
    assert "server cannot list" in run_index("http://127.0.0.1:9/a", tmp_path / "other").stderr


@pytest.mark.slow
def test_tasks_of_an_array_share_the_tars(tmp_path: Path) -> None:
    hugging_face_layout(tmp_path / "repo", tars=5, samples=6)
    tars = tmp_path / "repo/data/train"
    index(tars, tmp_path / "alone")
    tasks = []
    for task in range(3):
        environment = {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_ARRAY_TASK_COUNT": "3"}
        command = [sys.executable, SCRIPT, *index_command(tars, tmp_path / "index")]
        options: Any = {"stdout": subprocess.PIPE, "text": True, "env": os.environ | environment}
        tasks.append(subprocess.Popen([*map(str, command)], **options))
    printed = [task.communicate() for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0, 0], printed
    assert sum("already there" in out for out, _ in printed) == 2
    assert contents(tmp_path / "index") == contents(tmp_path / "alone")
