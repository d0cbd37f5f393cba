"""Files are whole or absent, and a full disk takes lines of logs away, and nothing else."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.jobs.attempts import begin_attempt, read_attempts
from tests.support.waiting import ROOT
from vitscale.config.errors import EXIT_CODES, FailureKind
from vitscale.distributed import atomic_files
from vitscale.distributed.atomic_files import atomic_file, write_bytes
from vitscale.distributed.events import Failure, read_failures, record_failure
from vitscale.tracking.journal import Journal, read_rows


def test_content_is_flushed_before_the_rename_the_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any other order power loss can leave an empty file, or the old one after a commit."""
    calls: list[tuple[str, Any]] = []
    replace = os.replace

    def record_flush(fd: int) -> None:
        status = os.fstat(fd)
        folder = stat.S_ISDIR(status.st_mode)
        calls.append(("flush folder", None) if folder else ("flush", status.st_size))

    def record_rename(old: Path, new: Path) -> None:
        calls.append(("rename", Path(new).name))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", record_flush)
    monkeypatch.setattr(os, "replace", record_rename)
    write_bytes(tmp_path / "file", bytes(1000))
    assert calls == [("flush", 1000), ("rename", "file"), ("flush folder", None)]


def test_failed_write_leaves_the_old_file_alone(tmp_path: Path) -> None:
    write_bytes(tmp_path / "file", b"old")
    with pytest.raises(KeyError), atomic_file(tmp_path / "file") as file:
        file.write(b"new")
        raise KeyError
    assert (tmp_path / "file").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


SCRIPT = """
import sys
from vitscale.distributed.processes import run_rank_script

def main():
    for number in range(2000):
        print("line", number, "x" * 100)
        print("line", number, file=sys.stderr)
    open("done", "w").close()
    if sys.argv[1] == "write":
        with open("disk/big", "wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))

run_rank_script(main)
"""


def fill(folder: Path) -> Path:
    path = folder / "filler"
    with open(path, "wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(512))
            except OSError:
                return path


@pytest.mark.parametrize(("do", "code"), [("print", 0), ("write", EXIT_CODES[FailureKind.STORAGE])])
def test_a_rank_prints_on_a_full_disk(small_disk: Path, tmp_path: Path, do: str, code: int) -> None:
    fill(small_disk)
    with open(small_disk / "log", "ab") as log:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, do],
            stdout=log,
            stderr=log,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
    assert done.returncode == code and (tmp_path / "done").exists()


def test_what_a_full_disk_refuses_of_a_journal_is_written_later(small_disk: Path) -> None:
    journal = Journal(small_disk / "journal.jsonl", resume_step=0)
    journal.append({"train/loss": 1.0}, step=1)
    filler = fill(small_disk)
    for step in range(2, 200):
        journal.append({"train/loss": 1 / step}, step=step)
    assert journal.refused is not None
    assert len(list(read_rows(journal.path))) < 199
    filler.unlink()
    journal.append({"train/loss": 0.0}, step=200)
    assert journal.refused is None
    assert [row.step for row, _ in read_rows(journal.path)] == list(range(1, 201))


def test_records_of_a_full_disk_are_lost_with_a_warning(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(atomic_files, "PAUSES_S", ())
    filler = fill(small_disk)
    attempt = begin_attempt(small_disk, cluster="slurm", job_id="7")
    record_failure(small_disk, Failure(kind=FailureKind.OTHER, what="x" * 600))
    assert attempt.number == 1 and not read_attempts(small_disk)
    assert capsys.readouterr().err.count("No space left on device") == 1
    filler.unlink()
    begin_attempt(small_disk, cluster="slurm", job_id="7", restart=1)
    record_failure(small_disk, Failure(kind=FailureKind.OTHER, what="y"))
    assert [each.restart for each in read_attempts(small_disk)] == [1]
    assert [failure.what for failure in read_failures(small_disk)] == ["y"]
