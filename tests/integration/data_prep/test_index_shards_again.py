"""data_prep/index_shards.py when it is killed, repeated, shared by processes, or reads a URL."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from data_prep.indexing import folder as index_folder
from data_prep.indexing import remote as remote_indexing
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
    samples,
)
from tests.support.range_server import served
from vitscale.data.index import read_manifest, read_split
from vitscale.data.samples import SplitReader
from vitscale.data.settings import RemoteSettings


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
        remote = RemoteSettings(cache_path=str(tmp_path / "cache"))
        entries = read_split(str(tmp_path / "index"), split="train", remote_settings=remote)
        first = SplitReader(read_split(tmp_path / "local", split="train")).bytes_of(3)
        assert SplitReader(entries).bytes_of(3) == first
        # Cut exactly at a header, without its end mark: Python takes that for the end.
        with tarfile.open(tars / names[1]) as tar:
            header = tar.getmembers()[-3].offset
        os.truncate(tars / names[1], header)
        printed = index(server.url, tmp_path / "cut", splits, "images.max_bad_fraction=0.1")
        assert f"1 truncated_tar: {names[1]}; the samples before that are used" in printed
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
