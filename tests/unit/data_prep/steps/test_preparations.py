"""Small corpora prepared in the test process: classes, settings, rejected inputs, outages."""

from __future__ import annotations

import errno
import os
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.formats.ledger import Outcomes, write_ledger
from data_prep.sources.image_folder import ImageFolder
from data_prep.sources.protocol import Outage
from data_prep.steps import tars
from data_prep.steps.list_inputs import check_input
from data_prep.steps.work import WorkFolder, changed_settings, content_config, find_existing
from data_prep.verification import check_folder
from tests.support.corpora.image_corpus import corpus, encoded, ledger
from tests.support.corpora.preparing import prepare_here, run_of
from vitscale.config.errors import UserError
from vitscale.data.index import read_manifest, read_split

NUM_PICTURES = 8
OUTAGES = [errno.ESTALE, errno.EMFILE, errno.EREMOTEIO]
FAULTS = [errno.EIO, errno.EACCES]


def test_files_that_will_be_refused_need_no_space(tmp_path: Path) -> None:
    for number in range(NUM_PICTURES):
        write(tmp_path / "images" / f"cat/{number}.png", seed=number)
    with open(tmp_path / "images/cat/hole.png", "wb") as file:
        file.truncate(1 << 42)  # sparse: 4 TiB that take no disk
    images = {"max_bad_fraction": 1}
    prepare_here(run_of(tmp_path / "images", tmp_path / "shards", images=images))
    rows = ledger(tmp_path / "shards")
    assert rows["cat/hole.png"]["reason"] == "too_large"
    assert len(rows) == NUM_PICTURES + 1
    shards = read_manifest(tmp_path / "shards").splits["train"].shards
    assert [shard.samples for shard in shards] == [NUM_PICTURES]


def write(path: Path, *, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded("PNG", seed=seed))


def test_ignored_classes_leave_no_label(tmp_path: Path) -> None:
    for number in range(20):
        write(tmp_path / f"images/{'' if number % 4 else 'sub/'}{number}.png", seed=number)
    source = {"holdout_fraction": 0.2}
    run = run_of(tmp_path / "images", tmp_path / "s", source=source, labels={"values": "none"})
    prepare_here(run)
    manifest = read_manifest(tmp_path / "s")
    assert manifest.classes == ()
    rows = pq.read_table(tmp_path / "s/index.parquet").to_pylist()
    assert Counter((row["split"], row["label"]) for row in rows) == {
        ("train", -1): 16,
        ("test", -1): 4,
    }
    keys = {row["key"].partition("-")[2] for row in rows}
    assert {key for key in keys if "sub" not in key} == {str(n) for n in range(20) if n % 4}
    with tarfile.open(tmp_path / "s/train-000000.tar") as tar:
        assert {Path(name).suffix for name in tar.getnames()} == {".png"}
    assert {row["class"] for row in ledger(tmp_path / "s").values()} == {None}
    found = check_folder(tmp_path / "s", manifest=manifest, num_workers=1, advance=lambda num: None)
    assert found == []


def test_a_held_out_split_never_takes_all_images_of_a_class(tmp_path: Path) -> None:
    for name, num in (("few", 2), ("many", 5), ("one", 1)):
        for number in range(num):
            write(tmp_path / f"images/{name}/{number}.png", seed=100 * num + number)
    source = {"val_per_class": 2, "holdout_split": "val"}
    prepare_here(run_of(tmp_path / "images", tmp_path / "s", source=source))
    found = {}
    for split in ("train", "val"):
        index = read_split(tmp_path / "s", split=split)
        found[split] = np.bincount(index.label, minlength=3).tolist()
    assert index.classes == ("few", "many", "one")
    assert found == {"train": [1, 3, 1], "val": [1, 2, 0]}


def test_a_mount_point_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "shards").symlink_to("/proc")
    for output in (tmp_path / "shards", Path("/proc")):
        with pytest.raises(UserError, match=r"mount point(.|\n)*next: .*/proc/shards"):
            find_existing(WorkFolder(run_of(tmp_path, output)))


@pytest.mark.parametrize("fault", ["gone", "cut"])
def test_no_output_gets_its_name_without_all_its_tars(fault: str, tmp_path: Path) -> None:
    run = run_of(corpus(tmp_path / "images"), tmp_path / "shards")
    work = prepare_here(run, until="finish")
    tar = next((work.path / "tars").glob("train-*.tar"))
    if fault == "gone":
        tar.unlink()
    else:
        os.truncate(tar, tar.stat().st_size - 512)
    with pytest.raises(Outage, match="train-000000.tar, written before, is missing or has"):
        prepare_here(run)
    assert not (tmp_path / "shards").exists() and work.path.exists()


FILES = {"map": "cat,animal\n", "space": "animal\nplant\n", "leave_out": "a", "val_labels": "a"}


@pytest.mark.parametrize("key", FILES)
def test_a_changed_file_changes_the_settings(key: str, tmp_path: Path) -> None:
    section = "labels" if key in ("map", "space") else "source"
    listed = tmp_path / "list.csv"
    run = run_of(tmp_path, tmp_path / "out", **{section: {key: str(listed)}})
    with pytest.raises(UserError, match=f"{section}.{key}"):
        content_config(run)
    listed.write_text(FILES[key])
    before = content_config(run)
    assert changed_settings(before, content_config(run)) == []
    listed.write_text(FILES[key].replace("a", "b"))
    assert changed_settings(before, content_config(run)) == [f"{section}.{key}_blake3"]


def test_a_rotten_corpus_is_refused_before_all_of_it_is_read(tmp_path: Path) -> None:
    for i in range(40):
        path = tmp_path / "images" / "ab"[i % 2] / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"rotten {i}".encode())
    sections = {"shards": {"min_shards": 8}, "images": {"max_bad_fraction": 0.2}}
    run = run_of(tmp_path / "images", tmp_path / "shards", **sections)
    work = prepare_here(run, until="write shards")
    units = tars.shard_units(work)
    tars.write_shard(work, units[0])
    tars.check_bad(work, units[:1])
    tars.write_shard(work, units[1])
    with pytest.raises(UserError, match="at least 10 of 40 images are bad.*\n.*10 not_an_image"):
        tars.check_bad(work, units[:2])


@pytest.mark.parametrize(
    "name, kind, message",
    [
        ("t.parquet", "path_table", "1 damaged_table .*: 't.parquet'"),
        ("t.parquet", "parquet", "1 damaged_table .*: 't.parquet'"),
        ("cat/1.txt", "image_folder", "1 other_name .*: 'cat/1.txt'"),
    ],
)
def test_when_every_input_is_rejected_the_error_says_why(
    name: str, kind: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "source" / name
    file.parent.mkdir(parents=True)
    file.write_bytes(b"PAR1 cut")
    path = file if kind == "path_table" else tmp_path / "source"
    run = run_of(path, tmp_path / "shards", source={"kind": kind})
    with pytest.raises(UserError, match=rf"all \d inputs are rejected\n  {message}\n  next:"):
        prepare_here(run)


def test_a_split_without_a_sound_file_is_refused(tmp_path: Path) -> None:
    table = pa.table({"image": [encoded("PNG", seed=1)], "label": ["a"]})
    pq.write_table(table, tmp_path / "train.parquet")
    (tmp_path / "val.parquet").write_bytes(b"PAR1 cut")
    splits = {"train": "train.parquet", "val": "val.parquet"}
    run = run_of(
        tmp_path,
        tmp_path / "shards",
        source={"kind": "parquet", "splits": splits},
        images={"max_bad_fraction": 1},
    )
    with pytest.raises(UserError, match="'val' has no usable image\n.*1 damaged_table") as error:
        prepare_here(run)
    assert "source.splits.val" in error.value.text()


def sums_of(folder: Path, reasons: list[str | None]) -> Outcomes:
    columns: dict[str, list[str | None]] = {
        "path": [f"{i}" for i in range(len(reasons))],
        "reason": reasons,
        **dict.fromkeys(("split", "class", "changes", "detail", "key"), [None] * len(reasons)),
    }
    arrays = {name: pa.array(values, pa.string()) for name, values in columns.items()}
    return write_ledger(
        folder, [pa.table(arrays | {"blake3": pa.nulls(len(reasons), pa.binary(32))})]
    )


def test_files_of_other_names_do_not_dilute_the_limit(tmp_path: Path) -> None:
    others = ["other_name", "hidden"] * 500
    ledger = sums_of(tmp_path, ["bad_pixels"] * 2 + [None] * 8 + others)
    ledger.check(max_bad_fraction=0.2)
    with pytest.raises(UserError, match="2 of 10 images are bad, more than the fraction 0.19"):
        ledger.check(max_bad_fraction=0.19)


def test_images_left_out_by_the_settings_are_not_bad(tmp_path: Path) -> None:
    ledger = sums_of(tmp_path, ["small_class", "left_out", None])
    ledger.check(max_bad_fraction=0.0)


def test_an_unreadable_spool_stops_and_keeps_the_work(tmp_path: Path) -> None:
    table = pa.table({"image": [encoded("JPEG", seed=1)], "label": ["a"]})
    pq.write_table(table, tmp_path / "rows.parquet")
    run = run_of(tmp_path, tmp_path / "shards", source={"kind": "parquet"})
    work = prepare_here(run, until="write shards")
    (spool,) = (work.path / "spool").iterdir()
    os.truncate(spool, 100)
    with pytest.raises(Outage, match="the spool is too short"):
        prepare_here(run)
    assert work.path.exists()


@pytest.mark.parametrize("code", [*OUTAGES, *FAULTS], ids=errno.errorcode.get)
def test_outages_while_reading_reject_no_file(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(corpus(tmp_path / "images", num=1), tmp_path / "shards")
    status = (tmp_path / "images" / "cat" / "000.jpg").stat()
    row = {
        **{"path": b"cat/000.jpg", "file": b"", "offset": 0, "spooled": False},
        **{"num_bytes": status.st_size, "modified_ns": status.st_mtime_ns},
    }

    def fail(*arguments: object, **options: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("data_prep.steps.list_inputs.os.fstat", fail)
    try:
        assert check_input(WorkFolder(run), row).reason == "unreadable" and code in FAULTS
    except Outage as error:
        assert code in OUTAGES and "the source cannot be read" in error.text()
        assert "same command again" in error.text()
    finally:
        monkeypatch.undo()


def test_outages_while_listing_keep_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(corpus(tmp_path / "images", num=3), tmp_path / "shards")

    def lost(*arguments: object, **options: object) -> Iterator[None]:
        yield from ()
        raise OSError(errno.EREMOTEIO, os.strerror(errno.EREMOTEIO))

    with monkeypatch.context() as patch:
        patch.setattr(ImageFolder, "inputs", lost)
        with pytest.raises(Outage, match="the source cannot be read"):
            prepare_here(run)
    prepare_here(run)
    assert read_manifest(tmp_path / "shards").inputs["num_kept"] == 6


@pytest.mark.parametrize("mount", ["images", "images/cat"])
@pytest.mark.parametrize("leaves_a_folder", [False, True])
def test_an_unmounted_source_keeps_the_work_and_resumes(
    mount: str, leaves_a_folder: bool, tmp_path: Path
) -> None:
    run = run_of(corpus(tmp_path / "images", num=3), tmp_path / "shards")
    p = prepare_here(run, until="write shards")
    times = (tmp_path / "images").stat()
    (tmp_path / mount).rename(tmp_path / "aside")
    if leaves_a_folder:
        (tmp_path / mount).mkdir()
    with pytest.raises(Outage, match="missing or empty") as stopped:
        prepare_here(run)
    assert ".shards.preparing" in stopped.value.text() and "mount it" in stopped.value.text()
    if leaves_a_folder:
        (tmp_path / mount).rmdir()
    (tmp_path / "aside").rename(tmp_path / mount)
    os.utime(tmp_path / "images", ns=(times.st_atime_ns, times.st_mtime_ns))  # as after a mount
    assert (p.path / "rows.arrow").exists()
    prepare_here(run)
    assert read_manifest(tmp_path / "shards").inputs["num_kept"] == 6
