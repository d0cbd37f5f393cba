"""data_prep/index_shards.py on the tar layouts of other projects; killed, shared, or at a URL."""

import gzip
import json
import os
import shutil
import tarfile
from collections import Counter

import pyarrow.parquet as pq
import yaml
from PIL import Image

from data_prep.formats.index_files import shards_of
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


def refusal(*arguments, code=2):
    """The error of an index that is not made."""
    done = run_index(*arguments)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_img2dataset_layout(tmp_path):
    tars = tmp_path / "tars"
    folder = tmp_path / "index"
    stored = img2dataset_layout(tars, tars=3, samples=10)
    before = contents(tars)
    printed = index(tars, folder, "source.label=json:synset")
    assert "24 inputs = 24 kept + 0 rejected" in printed
    assert samples(folder, "train") == stored

    # The files of facts beside the tars are no inputs.
    reasons = Counter(row["reason"] for row in ledger(folder).values())
    assert reasons == {None: 24}
    assert contents(tars) == before, "the tars are left as they were"
    verify(folder)

    # Again the same: nothing to do. With another label: another index, which must not replace it.
    assert "already there" in index(tars, folder, "source.label=json:synset")
    assert "exists already" in refusal(tars, folder, "source.label=json:caption")


def test_imagenet_22k_layout_with_both_label_spaces(tmp_path):
    tars = tmp_path / "tars"
    num_tars = {"train": 3, "validation": 1}
    # Both ways to name several tars.
    splits = (
        'source.splits={train: "imagenet22k-train-{0000..0002}.tar", '
        'val: "imagenet22k-validation-*.tar"}'
    )
    names = {"train": "train", "validation": "val"}
    wide_space = known_space("imagenet_22k")
    narrow_space = known_space("imagenet_12k")

    # What each index must have, from what was written.
    wide = {"train": {}, "val": {}}
    narrow = {"train": {}, "val": {}}
    written = imagenet_22k_layout(tars, splits=num_tars, samples=6)
    for split, key, image, label, label_12k in written:
        wide[names[split]][key] = (image, wide_space[label])
        if label_12k >= 0:
            narrow[names[split]][key] = (image, narrow_space[label_12k])

    fixed = [splits, "labels.values=index"]
    index(tars, tmp_path / "22k", *fixed, "labels.space=imagenet_22k")
    index(
        tars,
        tmp_path / "12k",
        *fixed,
        "labels.space=imagenet_12k",
        "source.label=json:label_12k",
        "labels.unknown=reject",
    )
    for name, expected in (("22k", wide), ("12k", narrow)):
        for split in ("train", "val"):
            assert samples(tmp_path / name, split) == expected[split]
        verify(tmp_path / name)

    # All classes of the space, although the samples have few of them.
    assert len(read_manifest(tmp_path / "22k").classes) == 21_841
    assert len(read_manifest(tmp_path / "12k").classes) == 11_821
    entries = ledger(tmp_path / "12k").values()
    rejected = [entry for entry in entries if entry["status"] == "rejected"]
    reasons = {(entry["reason"], entry["class"]) for entry in rejected}
    assert reasons == {("unknown_class", "-1")}


def test_hugging_face_layout_with_named_labels(tmp_path):
    stored = hugging_face_layout(tmp_path / "repo", tars=2, samples=6)
    folder = tmp_path / "index"
    index(tmp_path / "repo/data", folder, "source.splits={train: train}")
    assert samples(folder, "train") == stored
    # With their folder, without which two splits could have a tar of one name.
    names = [shard.name for shard in shards_of(folder, read_manifest(folder))]
    assert names == ["train/0000.tar", "train/0001.tar"]


def test_indexing_our_shards_reproduces_their_index(tmp_path):
    shards = tmp_path / "shards"
    folder = tmp_path / "index"
    made = make_shard_folder(shards, lengths={"train": (13, 12)}, rejected=())
    # Our tars hold numbers of classes; their names are given to the index again.
    classes = tmp_path / "classes.txt"
    classes.write_text("\n".join(made.classes))
    index(shards, folder, f"labels.space={classes}", "labels.values=index")
    indexed = read_manifest(folder)
    # Then runs on either see the same samples in the same order.
    assert indexed.fingerprint == made.fingerprint
    assert indexed.splits == made.splits
    old = pq.read_table(shards / "index.parquet")
    new = pq.read_table(folder / "index.parquet")
    assert old.to_pylist() == new.to_pylist()


def test_tars_of_images_alone_give_an_index_without_labels(tmp_path):
    tars = tmp_path / "tars"
    folder = tmp_path / "index"
    rows = [{"__key__": f"k{i}", "jpg": photo(i)} for i in range(3)]
    # One has a label, which then must not be read: half-labelled tars have no classes.
    rows.append({"__key__": "k3", "jpg": photo(3), "cls": 7})
    write_tar(tars / "a.tar", rows)
    # Nobody loses labels without asking for that.
    advice = "next: set source.label to where the labels are, or labels.values=none"
    assert advice in refusal(tars, folder)

    # What is printed names a recipe that trains without labels, and what it needs.
    text = index(tars, folder, "labels.values=none")
    assert "no labels" in text
    assert "mae/b16" in text
    assert "data.val_split=null" in text
    assert read_split(folder, split="train").label.tolist() == [-1] * 4
    assert read_manifest(folder).classes == ()
    assert {row["class"] for row in ledger(folder).values()} == {None}
    verify(folder)


def test_unusable_inputs_are_in_the_ledger(tmp_path):
    good = [{"__key__": f"good{i}", "jpg": photo(i), "cls": 0} for i in range(38)]

    # What decoders can turn into RGB is never converted.
    cmyk = encoded(Image.new("CMYK", (30, 20)), "JPEG", exif=rotated(6))
    good.append({"__key__": "cmyk", "jpg": cmyk, "cls": 0})
    broken = {
        "packed": gzip.compress(photo(1)),
        "text": b"<html>",
        "cut": photo(1)[:-200],
    }
    bad = [{"__key__": key, "jpg": image, "cls": 0} for key, image in broken.items()]
    bad.append({"__key__": "unlabelled", "jpg": photo(1), "txt": "a cat"})
    bad.append({"__key__": "imageless", "cls": 0})
    tars = tmp_path / "tars"
    folder = tmp_path / "index"
    write_tar(tars / "a.tar", good + bad)
    # Cut in the middle of a member, as by a download that broke off.
    cut_tar = tars / "b.tar"
    write_tar(cut_tar, good[:3])
    os.truncate(cut_tar, 3 * 2048 + 100)

    text = refusal(tars, folder)
    assert "images are bad" in text
    assert "label where source.label says: cls or json:FIELD in tars" in text
    assert not folder.exists()

    index(tars, folder, "images.max_bad_fraction=0.3")
    rows = ledger(folder)
    reasons = {path.split("/", 1)[-1]: row["reason"] for path, row in rows.items()}
    expected = yaml.safe_load("""
    packed.jpg: packed
    text.jpg: not_an_image
    cut.jpg: bad_pixels
    unlabelled.jpg: no_label
    imageless.cls: no_image
    b.tar: truncated_tar
    """)
    assert expected.items() <= reasons.items()
    indexed = samples(folder, "train")
    assert indexed["cmyk"] == (cmyk, "0")

    # Both tars have good0: these keys got the name of their tar.
    assert len(indexed) == 40
    assert {"a/good0", "b/good0"} <= indexed.keys()

    # The tar was truncated before indexing, so it still equals its index.
    verify(folder)
    os.truncate(cut_tar, 3 * 2048)
    finished = run(VERIFY, folder)
    assert finished.returncode == 2
    assert "b.tar: content differs" in finished.stdout


def test_the_path_of_the_tars_is_relative_if_movable(tmp_path):
    hugging_face_layout(tmp_path / "here/tars", tars=1, samples=6)
    tars = tmp_path / "here/tars/data/train"
    index(tars, tmp_path / "here/index")
    index(tars, tmp_path / "elsewhere/index")
    # Relative where index and tars have a folder in common that people would move or mount.
    assert read_manifest(tmp_path / "here/index").shards_root == "../tars/data/train"
    assert read_manifest(tmp_path / "elsewhere/index").shards_root == str(tars)

    # An index alone may move, and so may both together.
    shutil.move(tmp_path / "elsewhere/index", tmp_path / "index")
    assert len(samples(tmp_path / "index", "train")) == 6
    shutil.move(tmp_path / "here", tmp_path / "there")
    assert len(samples(tmp_path / "there/index", "train")) == 6
    # The first one now points to where the tars were.
    finished = run(VERIFY, tmp_path / "index")
    assert finished.returncode == 2
    assert "cannot be read" in finished.stdout


# What only new tars could have, another kind of source, and labels that are not there.
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
    tars = tmp_path / "repo/data/train"
    text = refusal(tars, tmp_path / "index", *overrides.split())
    for message in messages:
        assert message in text
    assert not (tmp_path / "index").exists()


def test_tars_sorted_by_class_are_refused_for_training(tmp_path, monkeypatch):
    # The order shuffles within blocks of tars; with the real size this would take hundreds.
    monkeypatch.setattr("vitscale.data.order.BLOCK_SHARDS", 1)
    tars = tmp_path / "tars"
    folder = tmp_path / "index"
    for label in range(20):
        rows = [{"__key__": f"{i}", "jpg": photo(0), "cls": label} for i in range(20)]
        write_tar(tars / f"{label:03d}.tar", rows)
    # One worker is this process, where the patch is.
    text = refusal(tars, folder, "num_workers=1")
    assert "1 of its 20 tars at a time, which have 1 classes" in text
    assert "next: write shuffled ones" in text
    assert not folder.exists()
    # To an evaluation the order makes no difference.
    index(tars, folder, 'source.splits={val: "*.tar"}')


def test_a_tar_that_changes_meanwhile_is_refused(tmp_path):
    hugging_face_layout(tmp_path / "repo", tars=3, samples=6)
    tars = tmp_path / "repo/data/train"
    folder = tmp_path / "index"
    argv = [str(argument) for argument in index_command(tars, folder)]
    command = load_command(DataPrepRun, program="", description="", argv=argv)

    # The first steps, as far as a command comes that is killed after it has read the tars.
    work = WorkFolder(command.run)
    open_work_folder(work)
    run_steps(work, STEPS[:2], num_workers=1)
    changed, *_ = sorted(tars.glob("*.tar"))
    os.utime(changed, ns=(1, 1))
    assert "changed while" in refusal(tars, folder)
    # It has thrown away what it had: now the tars are read as they are.
    index(tars, folder)


def test_tars_at_a_url_are_indexed_in_place(tmp_path, monkeypatch):
    """An outage loses no tar; nothing is copied; the index equals the local one."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    hugging_face_layout(tmp_path / "repo", tars=4, samples=6)
    tars = tmp_path / "repo/data/train"
    names = sorted(path.name for path in tars.glob("*.tar"))
    index(tars, tmp_path / "local", "source.splits={train: '*.tar'}")
    folder = tmp_path / "index"
    with served(tars) as server:
        # A server over HTTP cannot list, so all names are given.
        splits = f"source.splits={{train: '{{{','.join(names)}}}'}}"
        server.fault = lambda path, number: {names[2]: "forbidden"}.get(path)
        text = refusal(server.url, folder, splits, "num_workers=1", code=74)
        assert f"{names[2]}: cannot be read" in text
        work = tmp_path / ".index.preparing"
        assert len(list(work.glob("tars/*.arrow"))) == 2
        assert not list(work.rglob("*.tar"))
        server.fault = lambda path, number: None
        server.requests.clear()
        index(server.url, folder, splits)

        # Only the sizes of what was done before.
        first, second, _, last = (server.requests[name] for name in names)
        assert first == second < last
        remote = read_manifest(folder)
        local = read_manifest(tmp_path / "local")
        assert remote.splits == local.splits
        assert remote.shards_root == server.url
        assert remote.index_blake3 == local.index_blake3
        # timm reads URLs from here.
        info = json.loads((folder / "_info.json").read_text())["splits"]
        assert info["train"]["filenames"][0].startswith(f"{server.url}/")
        cache = RemoteSettings(cache_path=str(tmp_path / "cache"))
        entries = read_split(str(folder), split="train", remote_settings=cache)
        expected = read_split(tmp_path / "local", split="train").read(3)
        assert entries.read(3) == expected

        # Cut exactly at a header, without its end mark: Python takes that for the end.
        with tarfile.open(tars / names[1]) as tar:
            header = tar.getmembers()[-3].offset
        os.truncate(tars / names[1], header)
        # One of 24 samples is lost, which is more than the default allows.
        allowed = "images.max_bad_fraction=0.1"
        printed = index(server.url, tmp_path / "cut", splits, allowed)
        assert "1 truncated_tar" in printed
        assert names[1] in printed
    text = refusal("http://127.0.0.1:9/a", tmp_path / "other")
    assert "server cannot list" in text
