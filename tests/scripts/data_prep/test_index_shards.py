"""data_prep/index_shards.py on the tar layouts of other projects; killed, shared, or at a URL."""

import gzip
import json
import os
import shutil
import tarfile
from collections import Counter

import pyarrow.parquet as pq
from PIL import Image

from data_prep.index_shards import STEPS
from data_prep.steps.work import WorkFolder, open_work_folder, run_steps
from tests.support.corpora.external_tars import (
    hugging_face_layout,
    imagenet_22k_layout,
    img2dataset_layout,
    photo,
    write_tar,
)
from tests.support.corpora.image_corpus import contents, ledger
from tests.support.corpora.image_samples import encoded, rotated
from tests.support.corpora.indexing import (
    VERIFY,
    index,
    index_command,
    run,
    run_index,
    samples,
    verify,
)
from tests.support.corpora.shard_folders import make_shard_folder
from tests.support.range_server import served
from tests.support.tables import rows
from vitscale.config.command_line import load_command
from vitscale.data.index import read_manifest, read_split
from vitscale.data.label_spaces import known_space
from vitscale.data.settings import RemoteSettings
from vitscale.runs.data_prep import DataPrepRun


def test_img2dataset_layout(tmp_path):
    stored = img2dataset_layout(tmp_path / "tars", tars=3, samples=10)
    before = contents(tmp_path / "tars")
    printed = index(tmp_path / "tars", tmp_path / "index", "source.label=json:synset")
    assert "24 inputs = 24 kept + 0 rejected" in printed
    assert samples(tmp_path / "index", "train") == stored

    # The files of facts beside the tars are no inputs.
    assert Counter(row["reason"] for row in ledger(tmp_path / "index").values()) == {
        None: 24
    }
    assert contents(tmp_path / "tars") == before, "the tars are left as they were"
    verify(tmp_path / "index")
    assert "already there" in index(
        tmp_path / "tars", tmp_path / "index", "source.label=json:synset"
    )
    other = run_index(
        tmp_path / "tars", tmp_path / "index", "source.label=json:caption"
    )
    assert other.returncode == 2
    assert "exists already" in other.stderr


def test_imagenet_22k_layout_with_both_label_spaces(tmp_path):
    tars = tmp_path / "tars"
    rows = list(
        imagenet_22k_layout(tars, splits={"train": 3, "validation": 1}, samples=6)
    )
    splits = (
        'source.splits={train: "imagenet22k-train-{0000..0002}.tar", '
        'val: "imagenet22k-validation-*.tar"}'
    )
    fixed = [splits, "labels.values=index"]
    index(tars, tmp_path / "22k", *fixed, "labels.space=imagenet_22k")
    more = [
        "labels.space=imagenet_12k",
        "source.label=json:label_12k",
        "labels.unknown=reject",
    ]
    index(tars, tmp_path / "12k", *fixed, *more)
    spaces = {"22k": known_space("imagenet_22k"), "12k": known_space("imagenet_12k")}
    for split, name in (("train", "train"), ("validation", "val")):
        wide = {
            key: (image, spaces["22k"][y]) for s, key, image, y, _ in rows if s == split
        }
        assert samples(tmp_path / "22k", name) == wide
        narrow = {
            k: (i, spaces["12k"][z]) for s, k, i, _, z in rows if s == split and z >= 0
        }
        assert samples(tmp_path / "12k", name) == narrow
    assert [len(read_manifest(tmp_path / name).classes) for name in spaces] == [
        21_841,
        11_821,
    ]
    rejected = [
        row for row in ledger(tmp_path / "12k").values() if row["status"] == "rejected"
    ]
    assert {(row["reason"], row["class"]) for row in rejected} == {
        ("unknown_class", "-1")
    }
    verify(tmp_path / "22k")
    verify(tmp_path / "12k")


def test_hugging_face_layout_with_named_labels(tmp_path):
    stored = hugging_face_layout(tmp_path / "repo", tars=2, samples=6)
    index(tmp_path / "repo/data", tmp_path / "index", "source.splits={train: train}")
    assert samples(tmp_path / "index", "train") == stored
    names = [
        shard.name for shard in read_manifest(tmp_path / "index").splits["train"].shards
    ]
    assert names == ["train/0000.tar", "train/0001.tar"]


def test_indexing_our_shards_reproduces_their_index(tmp_path):
    made = make_shard_folder(
        tmp_path / "shards", lengths={"train": (13, 12)}, rejected=()
    )
    (tmp_path / "classes.txt").write_text("\n".join(made.classes))
    space = [f"labels.space={tmp_path / 'classes.txt'}", "labels.values=index"]
    index(tmp_path / "shards", tmp_path / "index", *space)
    found = read_manifest(tmp_path / "index")
    assert found.fingerprint == made.fingerprint
    assert found.splits["train"].shards == made.splits["train"].shards
    old, new = (
        pq.read_table(tmp_path / name / "index.parquet") for name in ("shards", "index")
    )
    assert old.to_pylist() == new.to_pylist()


def test_tars_of_images_alone_give_an_index_without_labels(tmp_path):
    rows = [{"__key__": f"k{i}", "jpg": photo(i)} for i in range(3)]
    write_tar(
        tmp_path / "tars/a.tar", [*rows, {"__key__": "k3", "jpg": photo(3), "cls": 7}]
    )
    refused = run_index(tmp_path / "tars", tmp_path / "index")
    assert (
        "next: set source.label to where the labels are, or labels.values=none"
        in refused.stderr
    )
    text = index(tmp_path / "tars", tmp_path / "index", "labels.values=none")
    assert "no labels" in text
    assert "mae/b16" in text
    assert "data.val_split=null" in text
    assert read_split(tmp_path / "index", split="train").label.tolist() == [-1] * 4
    assert read_manifest(tmp_path / "index").classes == ()
    assert {row["class"] for row in ledger(tmp_path / "index").values()} == {None}
    verify(tmp_path / "index")


def test_unusable_inputs_are_in_the_ledger(tmp_path):
    good = [{"__key__": f"good{i}", "jpg": photo(i), "cls": 0} for i in range(38)]

    # What decoders can turn into RGB is never converted.
    cmyk = encoded(Image.new("CMYK", (30, 20)), "JPEG", exif=rotated(6))
    good.append({"__key__": "cmyk", "jpg": cmyk, "cls": 0})
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
    assert refused.returncode == 2
    assert "images are bad" in refused.stderr
    assert "label where source.label says: cls or json:FIELD in tars" in refused.stderr
    assert not (tmp_path / "index").exists()
    index(tmp_path / "tars", tmp_path / "index", "images.max_bad_fraction=0.3")
    rows = ledger(tmp_path / "index")
    reasons = {path.split("/", 1)[-1]: row["reason"] for path, row in rows.items()}
    assert reasons["packed.jpg"] == "packed"
    assert reasons["text.jpg"] == "not_an_image"
    assert reasons["cut.jpg"] == "bad_pixels"
    assert reasons["unlabelled.jpg"] == "no_label"
    assert reasons["imageless.cls"] == "no_image"
    assert reasons["b.tar"] == "truncated_tar"
    assert samples(tmp_path / "index", "train")["cmyk"] == (cmyk, "0")

    # Both tars have good0: these keys got the name of their tar.
    found = samples(tmp_path / "index", "train")
    assert len(found) == 40
    assert {"a/good0", "b/good0"} <= found.keys()

    # The tar was truncated before indexing, so it still equals its index.
    verify(tmp_path / "index")
    with open(tmp_path / "tars/b.tar", "r+b") as file:
        file.truncate(3 * 2048)
    finished = run(VERIFY, tmp_path / "index")
    assert finished.returncode == 2
    assert "b.tar: content differs" in finished.stdout


def test_the_path_of_the_tars_is_relative_if_movable(tmp_path):
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
    assert finished.returncode == 2
    assert "cannot be read" in finished.stdout


@rows("""
- [overrides, messages]
- [source.holdout_fraction=0.1, ["source.holdout_fraction: requires rewriting the tars"]]
- - images.short_side=256 source.min_images_per_class=2
  - ["images.short_side: requires rewriting", "source.min_images_per_class: requires"]
- [source.kind=image_folder, ["source.kind: must be webdataset"]]
- [source.label=txt, [is not a label of a WebDataset]]
- - labels.space=imagenet_1k
  - - 3 classes of the source (6 images) are not among the 1,000
    - ; 0 images match
""")
def test_settings_that_rewrite_tars_are_refused(tmp_path, overrides, messages):
    hugging_face_layout(tmp_path / "repo", tars=1, samples=6)
    finished = run_index(
        tmp_path / "repo/data/train", tmp_path / "index", *overrides.split()
    )
    assert finished.returncode == 2, finished.stdout + finished.stderr
    for message in messages:
        assert message in finished.stderr
    assert "Traceback" not in finished.stderr
    assert not (tmp_path / "index").exists()


def test_tars_sorted_by_class_are_refused_for_training(tmp_path, monkeypatch):
    monkeypatch.setattr("vitscale.data.order.BLOCK_SHARDS", 1)
    for label in range(20):
        rows = [{"__key__": f"{i}", "jpg": photo(0), "cls": label} for i in range(20)]
        write_tar(tmp_path / "tars" / f"{label:03d}.tar", rows)
    text = run_index(tmp_path / "tars", tmp_path / "index", "num_workers=1").stderr
    assert "1 of its 20 tars at a time, which have 1 classes" in text
    assert "next: write shuffled ones" in text
    assert not (tmp_path / "index").exists()
    index(tmp_path / "tars", tmp_path / "index", 'source.splits={val: "*.tar"}')


def test_a_tar_that_changes_meanwhile_is_refused(tmp_path):
    hugging_face_layout(tmp_path / "repo", tars=3, samples=6)
    tars = tmp_path / "repo/data/train"
    arguments = index_command(tars, tmp_path / "index")
    argv = [str(argument) for argument in arguments]
    work = WorkFolder(
        load_command(DataPrepRun, program="", description="", argv=argv).run
    )
    open_work_folder(work)
    run_steps(work, STEPS[:2], num_workers=1)
    os.utime(sorted(tars.glob("*.tar"))[0], ns=(1, 1))
    finished = run_index(tars, tmp_path / "index")
    assert finished.returncode == 2
    assert "changed while" in finished.stderr
    index(tars, tmp_path / "index")


def test_tars_at_a_url_are_indexed_in_place(tmp_path, monkeypatch):
    """An outage loses no tar; nothing is copied; the index equals the local one."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    hugging_face_layout(tmp_path / "repo", tars=4, samples=6)
    tars = tmp_path / "repo/data/train"
    names = sorted(path.name for path in tars.glob("*.tar"))
    index(tars, tmp_path / "local", "source.splits={train: '*.tar'}")
    with served(tars) as server:
        splits = f"source.splits={{train: '{{{','.join(names)}}}'}}"
        server.fault = lambda path, number: "forbidden" if path == names[2] else None
        failed = run_index(server.url, tmp_path / "index", splits, "num_workers=1")
        assert failed.returncode == 74
        assert f"{names[2]}: cannot be read" in failed.stderr
        work = tmp_path / ".index.preparing"
        assert len(list(work.glob("tars/*.arrow"))) == 2
        assert not list(work.rglob("*.tar"))
        server.fault = lambda path, number: None
        server.requests.clear()
        index(server.url, tmp_path / "index", splits)

        # Only the sizes of what was done before.
        assert (
            server.requests[names[0]]
            == server.requests[names[1]]
            < server.requests[names[3]]
        )
        found, local = (read_manifest(tmp_path / name) for name in ("index", "local"))
        assert found.splits == local.splits
        assert found.shards_root == server.url
        assert found.index_blake3 == local.index_blake3
        info = json.loads((tmp_path / "index/_info.json").read_text())["splits"]
        assert info["train"]["filenames"][0].startswith(f"{server.url}/")
        remote = RemoteSettings(cache_path=str(tmp_path / "cache"))
        entries = read_split(
            str(tmp_path / "index"), split="train", remote_settings=remote
        )
        first = read_split(tmp_path / "local", split="train").read(3)
        assert entries.read(3) == first

        # Cut exactly at a header, without its end mark: Python takes that for the end.
        with tarfile.open(tars / names[1]) as tar:
            header = tar.getmembers()[-3].offset
        os.truncate(tars / names[1], header)
        printed = index(
            server.url, tmp_path / "cut", splits, "images.max_bad_fraction=0.1"
        )
        assert "1 truncated_tar" in printed
        assert names[1] in printed
    assert (
        "server cannot list"
        in run_index("http://127.0.0.1:9/a", tmp_path / "other").stderr
    )
