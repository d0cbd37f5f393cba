"""Remote shards give the same run as local ones, for any network fault."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.corpora.shard_folders import write_shard_folder
from tests.support.loader_runs import Run
from tests.support.range_server import RangeServer, served
from tests.support.waiting import wait_until
from vitscale.config.errors import UserError
from vitscale.data import remote
from vitscale.data.index import MANIFEST_NAME, read_split
from vitscale.data.remote import RemoteFile, prefetch
from vitscale.data.settings import RemoteSettings

STEPS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("remote")
    return write_shard_folder(base / "shards", num_per_class=40, num_shards=20)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.02)


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> list[list[bytes]]:
    return Run(folder).batches(ranks=1, workers=0, start=0, stop=STEPS)


@pytest.fixture
def server(folder: Path) -> Iterator[RangeServer]:
    with served(folder) as running:
        yield running


def with_cache(tmp_path: Path) -> dict[str, Any]:
    return {"cache_path": str(tmp_path / "cache")}


def flaky(path: str, number: int) -> str | None:
    """Every fault, one request in two."""
    faults = ("error", None, "drop", None, "short", "wrong", None, "slow", None, None)
    return faults[number % len(faults)] if path.endswith(".tar") else None


def test_every_layout_gives_the_batches_of_local_shards(
    server: RangeServer, undisturbed: list[list[bytes]], tmp_path: Path
) -> None:
    run = Run(server.url, {"remote": with_cache(tmp_path)})
    server.fault = flaky
    found = run.batches(ranks=1, workers=0, start=0, stop=1)
    found += run.batches(ranks=3, workers=2, start=1, stop=STEPS)
    assert found == undisturbed
    assert len(list((tmp_path / "cache").iterdir())) > 15


def test_each_shard_is_prefetched_once_within_the_cache_size(
    folder: Path, server: RangeServer, undisturbed: list[list[bytes]], tmp_path: Path
) -> None:
    run = Run(server.url, {"remote": with_cache(tmp_path)})
    # In this process: workers end in the middle of a fetch, which another then begins again.
    assert run.batches(ranks=1, workers=0, start=0, stop=1) == undisturbed[:1]
    # Two blocks of 16 fit; the second is fetched while the first is read.
    index = read_split(server.url, split="train", remote_settings=run.settings(0).remote)
    files = [shard for shard in index.shards if isinstance(shard, RemoteFile)]

    def are_fetched() -> bool:
        prefetch(files)  # as each batch asks for it
        return all((tmp_path / "cache" / file.blake3_hex).exists() for file in files)

    wait_until(are_fetched)
    sent = dict(server.sent)
    tars = sum(num for name, num in sent.items() if name.endswith(".tar"))
    assert tars == sum(file.num_bytes for file in files)
    assert run.batches(ranks=3, workers=1, start=0, stop=STEPS) == undisturbed
    # All from the cache but the manifest.
    assert {name for name, num in server.sent.items() if num != sent[name]} == {MANIFEST_NAME}


def test_a_damaged_cache_file_is_fetched_again(
    server: RangeServer, undisturbed: list[list[bytes]], tmp_path: Path
) -> None:
    run = Run(server.url, {"remote": with_cache(tmp_path)})
    assert run.batches(ranks=1, workers=0, start=0, stop=STEPS) == undisturbed
    cached = [path for path in (tmp_path / "cache").iterdir() if len(path.name) == 64]
    for path in cached:
        path.write_bytes(b"x" * path.stat().st_size)
    assert run.batches(ranks=1, workers=1, start=0, stop=STEPS) == undisturbed
    assert not any(path.exists() and path.read_bytes()[:9] == b"x" * 9 for path in cached)


@pytest.mark.parametrize(("workers", "fault"), [(0, "error"), (2, "missing")])
def test_an_outage_ends_the_run_and_names_the_shard(
    workers: int, fault: str, server: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outage is no bit rot: substituting would make runs non-deterministic."""
    monkeypatch.setattr(remote, "PATIENCE_S", 1.0)
    run = Run(server.url, {"remote": with_cache(tmp_path)})
    server.fault = lambda path, number: fault if path.endswith(".tar") else None
    with pytest.raises(UserError, match=r"(?s)train-0000\d\d\.tar: cannot be read.*requests"):
        run.batches(ranks=1, workers=workers, start=0, stop=STEPS)


def test_an_external_manifest_cannot_name_other_places(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    path = copy / MANIFEST_NAME
    text = json.loads(path.read_text())
    for root, message in (
        (f"pipe:touch {tmp_path}/canary", "is not a plain URL"),
        (f"http://127.0.0.1/a::pipe:touch {tmp_path}/canary", "is not a plain URL"),
        ("/somewhere/else", "a path on one machine"),
    ):
        path.write_text(json.dumps(text | {"shards_root": root}))
        with served(copy) as server, pytest.raises(UserError, match=message):
            read_split(server.url, split="train")
    assert not (tmp_path / "canary").exists()


def test_an_index_with_another_hash_is_refused(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    data = (copy / "index.parquet").read_bytes()
    (copy / "index.parquet").write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
    remote = RemoteSettings(**with_cache(tmp_path))
    with served(copy) as server:
        with pytest.raises(UserError, match=r"index.parquet: cannot be read: .*not have the hash"):
            read_split(server.url, split="train", remote_settings=remote)
