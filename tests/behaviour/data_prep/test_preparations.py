"""Small corpora prepared in the test process: settings, rejects, outages; the order of rows."""

import errno
import hashlib
import os
import random
import re
import signal
import tarfile
import tracemalloc
from collections import Counter
from contextlib import suppress
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.formats.index_files import shards_of
from data_prep.formats.ledger import Outcomes
from data_prep.sources.image_folder import ImageFolder
from data_prep.sources.protocol import Input
from data_prep.steps import tars, work
from data_prep.steps.list_inputs import check_input, make_key, rows_table
from data_prep.steps.listed_rows import STORED_ORDER
from data_prep.steps.plan_shards import held_out, read_plan, with_unique_keys
from data_prep.steps.work import WorkFolder, content_config, find_existing
from data_prep.verification import check_folder
from tests.support.corpora.image_corpus import (
    corpus,
    encoded,
    ledger,
    prepare_here,
    prepared,
    run_of,
)
from tests.support.corpora.sources import touch, written
from tests.support.tables import every, refused, rows
from vitscale.config.changes import changed_settings
from vitscale.config.errors import StorageError
from vitscale.data.index import read_manifest

NUM_PICTURES = 8

# What often passes: a stale handle, no free descriptors, a lost mount. And what does not.
OUTAGES = [errno.ESTALE, errno.EMFILE, errno.EREMOTEIO]
FAULTS = [errno.EIO, errno.EACCES]


def test_files_that_will_be_refused_need_no_space(tmp_path):
    images = tmp_path / "images"
    output = tmp_path / "shards"
    for number in range(NUM_PICTURES):
        write(images / f"cat/{number}.png", seed=number)
    with open(images / "cat/hole.png", "wb") as file:
        file.truncate(1 << 42)  # sparse: 4 TiB that take no disk

    # Space is asked for before a byte is written, and no disk has 4 TiB to spare.
    manifest = prepared(images, output, images={"max_bad_fraction": 1})
    rows = ledger(output)
    assert rows["cat/hole.png"]["reason"] == "too_large"
    assert len(rows) == NUM_PICTURES + 1
    assert [shard.samples for shard in shards_of(output, manifest)] == [NUM_PICTURES]


def write(path, *, seed):
    written(path, encoded("PNG", seed=seed))


def test_ignored_classes_leave_no_label(tmp_path):
    images = tmp_path / "images"
    output = tmp_path / "s"
    at_top = set()
    for number in range(20):
        if number % 4:
            at_top.add(str(number))
            write(images / f"{number}.png", seed=number)
        else:
            write(images / f"sub/{number}.png", seed=number)
    held_out = {"holdout_fraction": 0.2}
    labels = {"values": "none"}
    manifest = prepared(images, output, source=held_out, labels=labels)
    assert manifest.classes == ()
    rows = pq.read_table(output / "index.parquet").to_pylist()
    counts = Counter((row["split"], row["label"]) for row in rows)
    assert counts == {("train", -1): 16, ("test", -1): 4}

    # Keys begin with the split; no class follows, and a sub-folder is part of the name.
    keys = {row["key"].partition("-")[2] for row in rows}
    assert {key for key in keys if "sub" not in key} == at_top
    with tarfile.open(output / "train-000000.tar") as tar:
        assert {Path(name).suffix for name in tar.getnames()} == {".png"}

    # Neither has the ledger a class, and the output is sound.
    assert {row["class"] for row in ledger(output).values()} == {None}
    assert check_folder(output, manifest=manifest, num_workers=1) == []


def test_nothing_is_held_out_of_a_table_with_splits(tmp_path):
    table = ["image,label,split"]
    splits = ["train"] * 8 + ["val"] * 2
    for number, split in enumerate(splits):
        write(tmp_path / f"{number}.png", seed=number)
        table.append(f"{number}.png,{number % 2},{split}")
    path = tmp_path / "table.csv"
    path.write_text("\n".join(table))
    source = {"kind": "path_table", "holdout_fraction": 0.5}
    output = tmp_path / "s"

    # Of about 27,000 bytes that both splits need together.
    full = mock.patch("shutil.disk_usage", return_value=mock.Mock(free=22_000))
    with full, pytest.raises(StorageError, match="are free"):
        prepared(path, output, source=source)

    # The same command after space was made.
    made = prepared(path, output, source=source).splits
    nums = {name: split.num_samples for name, split in made.items()}
    assert nums == {"train": 8, "val": 2}


def test_a_mount_point_is_refused_before_any_work(tmp_path):
    # The last step renames the work folder to this name, which a mount point would refuse.
    link = tmp_path / "shards"
    link.symlink_to("/proc")
    for output in (link, Path("/proc")):
        work = WorkFolder(run_of(tmp_path, output))
        with refused(r"mount point(.|\n)*next: .*/proc/shards"):
            find_existing(work)


# After which step a file of the work folder is lost, or cut.
@rows("""
- [until, damaged, is_cut, message]
- [finish, tars/*.tar, false, 'train-000000.tar, written before, is missing or has']
- [finish, tars/*.tar, true, 'train-000000.tar, written before, is missing or has']
- [write shards, spool/*, true, the spool is too short]
""")
def test_lost_work_stops_and_keeps_the_rest(until, damaged, is_cut, message, tmp_path):
    """No output gets its name without all its tars."""
    table = pa.table({"image": [encoded("JPEG", seed=1)], "label": ["a"]})
    pq.write_table(table, tmp_path / "rows.parquet")
    output = tmp_path / "shards"
    run = run_of(tmp_path, output, source={"kind": "parquet"})
    work = prepare_here(run, until=until)
    (path,) = work.path.glob(damaged)
    if is_cut:
        os.truncate(path, 100)
    else:
        path.unlink()
    with pytest.raises(StorageError, match=message):
        prepare_here(run)
    assert not output.exists()
    assert work.path.exists()


# All files that are settings in themselves.
@rows(r"""
- [section, key, text]
- [labels, map, "cat,animal\n"]
- [labels, space, "animal\nplant\n"]
- [source, leave_out, a]
- [source, val_labels, a]
""")
def test_a_changed_file_changes_the_settings(section, key, text, tmp_path):
    listed = tmp_path / "list.csv"
    run = run_of(tmp_path, tmp_path / "out", **{section: {key: str(listed)}})

    # Without the file nobody can tell whether the work so far fits.
    with refused(f"{section}.{key}"):
        content_config(run)

    # The same bytes are the same settings, other bytes are others.
    listed.write_text(text)
    before = content_config(run)
    same = content_config(run)
    assert changed_settings(before, same, purpose="output") == {}

    listed.write_text(text.replace("a", "b"))
    after = content_config(run)
    changed = changed_settings(before, after, purpose="output")
    assert list(changed) == [f"{section}.{key}_blake3"]


@every(num_links="4, 5")
def test_too_many_bad_inputs_are_refused_before_an_image_is_read(num_links, tmp_path):
    """Hidden files and other names do not count: 4 of 20 are a fifth."""
    folder = tmp_path / "images/cat"
    touch(folder, *(f"{number}.txt" for number in range(30)))
    for number in range(20):
        path = folder / f"{number}.jpg"
        if number < num_links:
            # If one of the rotten ones were opened, it would count as bad, too.
            path.symlink_to("nowhere")
        else:
            path.write_bytes(b"rotten")
    images = {"max_bad_fraction": 0.2}
    run = run_of(folder.parent, tmp_path / "out", images=images)

    # A fifth is what the settings allow.
    if num_links == 4:
        work = prepare_here(run, until="write shards")
        assert read_plan(work).units
        return
    with refused("5 of 20 images are bad.*\n.*5 link_broken"):
        prepare_here(run, until="write shards")


@rows("""
- [name, kind, message]
- [t.parquet, path_table, '1 damaged_table .*: ''t.parquet''']
- [cat/1.txt, image_folder, '1 other_name .*: ''cat/1.txt''']
""")
def test_when_every_input_is_rejected_the_error_says_why(name, kind, message, tmp_path):
    file = written(tmp_path / "source" / name, b"PAR1 cut")

    # A table is named itself, a folder of images by its root.
    path = tmp_path / "source"
    if kind == "path_table":
        path = file
    with refused(rf"all \d inputs are rejected\n  {message}\n  next:"):
        prepared(path, tmp_path / "shards", source={"kind": kind})


def test_a_split_without_a_sound_file_is_refused(tmp_path):
    table = pa.table({"image": [encoded("PNG", seed=1)], "label": ["a"]})
    pq.write_table(table, tmp_path / "train.parquet")
    (tmp_path / "val.parquet").write_bytes(b"PAR1 cut")
    # However many bad images are allowed: evaluation needs one.
    sections = yaml.safe_load("""
    source: {kind: parquet, splits: {train: train.parquet, val: val.parquet}}
    images: {max_bad_fraction: 1}
    """)
    with refused("'val' has no usable image\n.*1 damaged_table") as error:
        prepared(tmp_path, tmp_path / "shards", **sections)
    assert "source.splits.val" in error.value.text()


def test_only_bad_images_count_against_the_limit():
    """Among files named like images; nor do those that the settings leave out."""
    reasons = ["bad_pixels"] * 2 + [None] * 8 + ["other_name", "hidden"] * 500
    paths = list(map(str, range(len(reasons))))
    table = pa.table({"path": paths, "reason": reasons})
    sums = Outcomes()
    sums.add(table)

    # Two of ten: the limit itself is allowed.
    sums.check(max_bad_fraction=0.2, num_images=10)
    with refused("2 of 10 images are bad, more than the fraction 0.19"):
        sums.check(max_bad_fraction=0.19, num_images=10)

    left_out = Outcomes()
    chosen = {"path": ["a", "b", "c"], "reason": ["small_class", "left_out", None]}
    left_out.add(pa.table(chosen))
    left_out.check(max_bad_fraction=0.0, num_images=left_out.num_images)

    # Examples are the first three, however many tables there are.
    sums.add(table)
    assert sums.examples["bad_pixels"] == ["0", "1", "0"]


def test_a_shard_is_written_without_holding_its_images(tmp_path):
    # A comment of JPEG has at most 65,533 bytes; sixteen of them make an image of 1 MiB.
    comment = b"\xff\xfe\xff\xff" + bytes(65_533)
    image = encoded("JPEG", seed=0)
    large = image[:2] + 16 * comment + image[2:]
    images = tmp_path / "images"
    for number in range(16):
        written(images / f"cat/{number}.jpg", large)
    run = run_of(images, tmp_path / "shards")
    work = prepare_here(run, until="write shards")
    (unit,) = read_plan(work).units

    # 16 images of 1 MiB: a writer that holds them all is above the limit.
    tracemalloc.start()
    tars.write_shard(work, unit)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 << 20
    tar = (work.path / unit).with_suffix(".tar")
    assert tar.stat().st_size > 16 << 20


@pytest.mark.parametrize("code", [*OUTAGES, *FAULTS], ids=errno.errorcode.get)
def test_outages_while_reading_reject_no_file(code, tmp_path, monkeypatch):
    images = corpus(tmp_path / "images", num=1)
    run = run_of(images, tmp_path / "shards")
    status = (images / "cat/000.jpg").stat()
    row = {
        "path": b"cat/000.jpg",
        "file": b"",
        "offset": 0,
        "spooled": False,
        "num_bytes": status.st_size,
        "modified_ns": status.st_mtime_ns,
    }

    def fail(*arguments, **options):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("data_prep.steps.list_inputs.os.fstat", fail)
    # A fault of the file is a row of the ledger; one of the storage stops before it becomes one.
    try:
        outcome = check_input(WorkFolder(run), row)
        assert outcome.reason == "unreadable"
        assert code in FAULTS
    except StorageError as error:
        assert code in OUTAGES
        text = error.text()
        assert "the source cannot be read" in text
        assert "same command again" in text
    finally:
        monkeypatch.undo()

    # Another size than when it was listed.
    with refused("changed while"):
        check_input(WorkFolder(run), row | {"num_bytes": 9})


def test_a_listing_that_is_cut_off_keeps_the_work(tmp_path, monkeypatch):
    run = run_of(corpus(tmp_path / "images", num=3), tmp_path / "shards")
    listed = ImageFolder.inputs

    def lost(*arguments, **options):
        yield from ()
        raise OSError(errno.EREMOTEIO, os.strerror(errno.EREMOTEIO))

    def stopped(*arguments, **options):
        with suppress(SystemExit):  # as callbacks of weak references do
            work._stop(signal.SIGTERM, None)
        yield from listed(*arguments, **options)

    for fault, error in ((lost, StorageError), (stopped, SystemExit)):
        with monkeypatch.context() as patch:
            patch.setattr(ImageFolder, "inputs", fault)

            # The signal must neither last nor change how this process treats others.
            patch.setattr(work, "_exit_code", 0)
            patch.setattr(work.signal, "signal", lambda *_: None)
            with pytest.raises(error, match=r"the source cannot be read|^75$"):
                prepare_here(run)

    # No part of a listing was taken for the whole: two classes of three.
    prepare_here(run)
    manifest = read_manifest(tmp_path / "shards")
    assert manifest.inputs["num_kept"] == 6


@every(leaves_a_folder="false, true", mount="images, images/cat")
def test_an_unmounted_source_keeps_the_work_and_resumes(
    mount, leaves_a_folder, tmp_path
):
    images = corpus(tmp_path / "images", num=3)
    run = run_of(images, tmp_path / "shards")
    work = prepare_here(run, until="write shards")

    # A mount leaves the times of its folder as they were.
    times = images.stat()
    mount_point = tmp_path / mount
    aside = tmp_path / "aside"
    mount_point.rename(aside)
    if leaves_a_folder:
        mount_point.mkdir()
    with pytest.raises(StorageError, match="missing or empty") as stopped:
        prepare_here(run)
    text = stopped.value.text()
    assert ".shards.preparing" in text
    assert "mount it" in text

    # As after a mount.
    if leaves_a_folder:
        mount_point.rmdir()
    aside.rename(mount_point)
    os.utime(images, ns=(times.st_atime_ns, times.st_mtime_ns))

    # The rows listed before are still there, and are used.
    assert (work.path / "rows.arrow").exists()
    prepare_here(run)
    manifest = read_manifest(tmp_path / "shards")
    assert manifest.inputs["num_kept"] == 6


# Names as bytes of no encoding, and those that keys must not have.
NAMES = st.text(
    st.characters(codec="utf-8") | st.sampled_from("\udcff\udc80/.-_aA"),
    min_size=1,
    max_size=120,
)


def make_input(path) -> Input:
    name = path.rpartition(".")[0] or path
    return Input(
        path=path,
        split="train",
        class_name="cat",
        name=name,
        num_bytes=1,
    )


def ordered(inputs: list[Input], *, batch, seed=0):
    """(path, key) in stored order."""
    tables = []
    for start in range(0, len(inputs), batch):
        tables.append(rows_table(inputs[start : start + batch], seed=seed))

    # An empty table is one, too: nothing may have been listed.
    tables.append(rows_table([], seed=0))
    rows = pa.concat_tables(tables).combine_chunks().sort_by(STORED_ORDER)
    return [(row["path"], row["key"]) for row in with_unique_keys(rows).to_pylist()]


@settings(deadline=None, max_examples=60)
@given(st.lists(NAMES, unique=True, max_size=60), st.integers(1, 20))
def test_order_and_keys_do_not_depend_on_the_order_of_listing(names, batch):
    inputs = [make_input(name) for name in names]
    whole = ordered(inputs, batch=1000)

    # Machines list a folder in other orders, and share the work differently.
    shuffled = random.Random(batch).sample(inputs, len(inputs))
    assert ordered(shuffled, batch=batch) == whole
    paths = [path for path, _ in whole]
    assert sorted(paths) == sorted(map(os.fsencode, names))

    # File systems without cases must tell them apart, too.
    keys = [key for _, key in whole]
    assert len({key.lower() for key in keys}) == len(keys)
    for key in keys:
        assert re.fullmatch(r"[A-Za-z0-9_-]{1,70}", key)


def test_order_is_that_of_sha256_written_out():
    inputs = [make_input(f"{number}.jpg") for number in range(50)]
    rows = ordered(inputs, batch=7, seed=5)

    def digest(path):
        # The purpose, the seed, and the key of the sample.
        number = path.removesuffix(b".jpg")
        return hashlib.sha256(b"order\x005\x00train-cat-" + number).digest()

    paths = [path for path, _ in rows]
    assert paths == sorted(paths, key=digest)
    assert len(paths) == len(inputs)

    # Another seed changes the order and nothing else.
    other = ordered(inputs, batch=7, seed=6)
    assert other != rows
    assert sorted(other) == sorted(rows)


def test_plain_names_stay_readable_and_others_get_a_hash():
    plain = make_key("n01440764", "n01440764_10026", path="p")
    assert plain == "n01440764-n01440764_10026"
    key = make_key("cat", "a b", path="p")
    assert re.fullmatch(r"cat-a_b-[0-9a-f]{16}", key)
    assert key != make_key("cat", "a b", path="q")

    # A name that looks hashed gets a hash of its own, so collisions cannot be forged.
    forged = key.removeprefix("cat-")
    assert make_key("cat", forged, path="q") != key


def test_each_class_holds_out_the_rows_with_its_smallest_hashes():
    rng = np.random.default_rng(0)
    class_of = rng.integers(0, 5, 300)
    hashes = rng.integers(0, 1 << 63, 300).astype(np.uint64)
    is_held_out = held_out(class_of, hashes, wanted=np.full(5, 7))
    for number in range(5):
        is_of_class = class_of == number
        smallest = sorted(hashes[is_of_class].tolist())[:7]
        taken = hashes[is_held_out & is_of_class]
        assert sorted(taken.tolist()) == smallest
