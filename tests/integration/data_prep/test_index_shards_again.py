"""data_prep/index_shards.py when it is killed, repeated, shared by processes, or reads a URL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from data_prep.index_shards import STEPS
from data_prep.steps.settings import open_work_folder
from data_prep.steps.work import WorkFolder, run_steps
from tests.support.corpora.external_tars import (
    hugging_face_layout,
    photo,
    write_tar,
)
from tests.support.corpora.indexing import (
    SCRIPT,
    contents,
    index,
    index_command,
    run_index,
)
from tests.support.range_server import served
from vitscale.config.command_line import load_command
from vitscale.data.index import read_manifest, read_split
from vitscale.data.samples import SplitReader
from vitscale.data.settings import RemoteSettings
from vitscale.runs.data_prep import DataPrepRun


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
    while not (work / "tars/000003.arrow").exists():
        assert process.poll() is None, "ended too early"
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "index").exists()
    # What was done stays: 300 bytes of the first tar are not read again.
    times = {path: path.stat().st_mtime_ns for path in (work / "tars").glob("*.arrow")}
    status = (tmp_path / "tars/00.tar").stat()
    whole = (tmp_path / "tars/00.tar").read_bytes()
    (tmp_path / "tars/00.tar").write_bytes(bytes(300) + whole[300:])
    os.utime(tmp_path / "tars/00.tar", ns=(status.st_atime_ns, status.st_mtime_ns))
    index(tmp_path / "tars", tmp_path / "index", "num_workers=1")
    assert not work.exists() and len(times) > 3
    for name in ("index.parquet", "ledger.parquet", "_info.json"):
        one, other = ((tmp_path / f / name).read_bytes() for f in ("undisturbed", "index"))
        assert one == other


def test_a_tar_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    hugging_face_layout(tmp_path / "repo", tars=3, samples=6)
    tars = tmp_path / "repo/data/train"
    arguments = index_command(tars, tmp_path / "index")
    argv = [str(argument) for argument in arguments]
    work = WorkFolder(load_command(DataPrepRun, script="", description="", argv=argv).run)
    open_work_folder(work)
    run_steps(work, STEPS[:2], num_workers=1)
    os.utime(sorted(tars.glob("*.tar"))[0], ns=(1, 1))
    finished = run_index(tars, tmp_path / "index")
    assert finished.returncode == 2 and "changed while" in finished.stderr
    index(tars, tmp_path / "index")


def test_tars_at_a_url_are_indexed_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        assert failed.returncode == 2 and f"{names[2]}: cannot be read" in failed.stderr
        work = tmp_path / ".index.preparing"
        assert len(list(work.glob("tars/*.arrow"))) == 2 and not list(work.rglob("*.tar"))
        server.fault = lambda path, number: None
        server.requests.clear()
        index(server.url, tmp_path / "index", splits)
        # Only the sizes of what was done before.
        assert server.requests[names[0]] == server.requests[names[1]] < server.requests[names[3]]
        found, local = (read_manifest(tmp_path / name) for name in ("index", "local"))
        assert found.splits == local.splits and found.shards_root == server.url
        assert found.index_blake3 == local.index_blake3
        remote = RemoteSettings(cache_path=str(tmp_path / "cache"))
        entries = read_split(str(tmp_path / "index"), split="train", remote_settings=remote)
        first = SplitReader(read_split(tmp_path / "local", split="train")).bytes_of(3)
        assert SplitReader(entries).bytes_of(3) == first
        # Cut exactly at a header, without its end mark: Python takes that for the end.
        with tarfile.open(tars / names[1]) as tar:
            header = tar.getmembers()[-3].offset
        os.truncate(tars / names[1], header)
        printed = index(server.url, tmp_path / "cut", splits, "images.max_bad_fraction=0.1")
        assert "1 truncated_tar" in printed and names[1] in printed
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
    # Every task reports the index, whoever wrote it.
    assert all("30 kept" in out or "already there" in out for out, _ in printed), printed
    assert contents(tmp_path / "index") == contents(tmp_path / "alone")
