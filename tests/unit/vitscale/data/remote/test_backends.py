"""Answers of web servers and buckets are bounded, through the real client libraries."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.peak_memory import peak_mib
from tests.support.range_server import HOSTILE, MORE_BYTES, RangeServer, served
from tests.support.waiting import PATIENCE_S
from vitscale.config.errors import UserError
from vitscale.data.index import read_manifest
from vitscale.data.remote import backends
from vitscale.data.remote.errors import EncodedError, NoRangesError
from vitscale.data.remote.index import MAX_MANIFEST_BYTES
from vitscale.data.remote.settings import RemoteSettings
from vitscale.data.remote.store import RemoteStorageError, RemoteStore
from vitscale.data.remote.urls import Url

BUCKETS = ("s3", "gs")
DATA = bytes(range(256)) * 40


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    folder = tmp_path / "served" / "bucket"
    folder.mkdir(parents=True)
    (folder / "a.bin").write_bytes(DATA)
    return folder


def options(scheme: str, server: RangeServer) -> dict[str, str]:
    keys = {"key": "key", "secret": "secret"} if scheme == "s3" else {"token": "anon"}
    return {"endpoint_url": server.url} | keys


def read(url: Url, num_bytes: int = 9) -> bytes:
    return backends.read_range(url, offset=5, num_bytes=num_bytes, timeout_s=PATIENCE_S)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", BUCKETS)
def test_buckets_answer_with_what_was_asked_for(
    scheme: str, bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no more: of other answers at most one byte too much, or the size of a listing."""
    import fsspec

    with served(bucket.parent) as server:
        monkeypatch.setitem(fsspec.config.conf, scheme, options(scheme, server))
        backends._filesystem.cache_clear()
        store, url = RemoteStore(patience_s=PATIENCE_S), Url(f"{scheme}://bucket")
        assert store.read(url / "a.bin", offset=5, num_bytes=9) == DATA[5:14]
        assert (store.size(url / "a.bin"), store.size(url / "b.bin")) == (len(DATA), None)
        expected = {
            "endless": (NoRangesError, "for 9 bytes with more"),
            "more": (NoRangesError, "for 9 bytes with more"),
            "gzip": (EncodedError, "Content-Encoding 'gzip'"),
            "endless_gzip": (EncodedError, "Content-Encoding 'gzip'"),
            "no_ranges": (NoRangesError, "status 200: no range requests"),
        }
        for fault, (kind, message) in expected.items():
            server.fault = lambda path, number, fault=fault: fault
            with pytest.raises(kind, match=message):
                read(url / "a.bin")
        server.fault = lambda path, number: "endless"
        with pytest.raises(Exception, match="more than 16,777,216 bytes"):
            backends.call(url, "ls", timeout_s=PATIENCE_S)
        assert server.sent["bucket"] < MORE_BYTES
        server.fault = lambda path, number: "endless_error"
        with pytest.raises(RemoteStorageError, match="cannot be read"):
            RemoteStore(patience_s=0.1).names(url)
        server.fault = lambda path, number: None
        with open(bucket / "manifest.json", "wb") as file:
            file.truncate(MAX_MANIFEST_BYTES + 1)
        with pytest.raises(UserError, match="too many for a manifest"):
            read_manifest(str(url), remote_settings=RemoteSettings())
        assert server.sent["bucket/manifest.json"] < 1000
        assert store.names(url) == ["a.bin", "manifest.json"]


IMPORTS = """
import fsspec
from vitscale.data.remote.backends import call, read_range
from vitscale.data.remote.urls import Url
fsspec.config.conf |= {options}
bases = {urls}
def read(base, bucket):
    url = Url(base + bucket) / "a.bin"
    return read_range(url, offset=1, num_bytes=9, timeout_s={patience_s})
def names(base, bucket):
    return call(Url(base + bucket), "ls", timeout_s={patience_s})
for base in bases:
    read(base, "bucket")
"""
WORK = """
for base in bases:
    for name in {hostile}:
        for work in (read, names):
            try:
                work(base, name)
            except Exception as error:
                continue
            raise AssertionError(base + name)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "scheme",
    [
        "http",
        "s3",
        # gcsfs repeats failed requests for a minute.
        pytest.param("gs", marks=pytest.mark.exhaustive),
    ],
)
def test_hostile_servers_do_not_fill_the_memory(scheme: str, bucket: Path) -> None:
    """Endless bodies, also of errors, bodies longer than asked for, and 128 MiB in a small gzip."""
    for name in HOSTILE:
        shutil.copytree(bucket, bucket.with_name(name))
    with served(bucket.parent) as server:
        server.fault = lambda path, number: next(
            (name for name in HOSTILE if path.split("/")[0] == name), None
        )
        imports = IMPORTS.format(
            options=json.dumps({scheme: options(scheme, server)} if scheme in BUCKETS else {}),
            urls=[f"{scheme}://" if scheme in BUCKETS else f"{server.url}/"],
            patience_s=PATIENCE_S,
        )
        assert peak_mib(imports=imports, work=WORK.format(hostile=HOSTILE)) < 64
