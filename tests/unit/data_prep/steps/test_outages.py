"""Storage errors: faults of one file reject it; outages lose no image and no work."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.sources.image_folder import ImageFolder
from data_prep.sources.protocol import Outage
from data_prep.steps.list_inputs import check_input
from data_prep.steps.work import WorkFolder
from tests.support.corpora.image_corpus import corpus, encoded
from tests.support.corpora.preparing import prepare_here, run_of
from vitscale.data.index import read_manifest

OUTAGES = [errno.ESTALE, errno.EMFILE, errno.EREMOTEIO]
FAULTS = [errno.EIO, errno.EACCES]


def parquet(folder: Path, *, num: int) -> Path:
    folder.mkdir()
    rows = [{"image": encoded("JPEG", seed=i, side=96), "label": f"c{i % 2}"} for i in range(num)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet", row_group_size=7)
    return folder


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_spool_loses_no_row(tmp_path: Path) -> None:
    source = parquet(tmp_path / "rows", num=30)
    run = run_of(source, tmp_path / "shards", source={"kind": "parquet"})
    with largest_file(60_000), pytest.raises(Outage) as stopped:
        prepare_here(run)
    assert "cannot be written (File too large)" in stopped.value.text()
    assert "rerun; the run resumes" in stopped.value.text()
    prepare_here(run)
    assert read_manifest(tmp_path / "shards").inputs["num_kept"] == 30


def test_an_unreadable_spool_stops_and_keeps_the_work(tmp_path: Path) -> None:
    source = parquet(tmp_path / "rows", num=4)
    run = run_of(source, tmp_path / "shards", source={"kind": "parquet"})
    p = prepare_here(run, until="write shards")
    (spool,) = (p.path / "spool").iterdir()
    os.truncate(spool, 100)
    with pytest.raises(Outage, match="the spool is too short"):
        prepare_here(run)
    assert p.path.exists()


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
