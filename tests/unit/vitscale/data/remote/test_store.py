"""Allowed and refused URLs; retries of requests."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.range_server import MORE_BYTES, served
from tests.support.waiting import PATIENCE_S
from vitscale.config.errors import UserError
from vitscale.config.redaction import redact
from vitscale.data.index import read_manifest
from vitscale.data.remote import store as remote_store
from vitscale.data.remote.index import MAX_MANIFEST_BYTES, remote_index
from vitscale.data.remote.settings import RemoteSettings
from vitscale.data.remote.store import (
    DamagedError,
    RemoteStorageError,
    RemoteStore,
    remote_counts,
)
from vitscale.data.remote.urls import Url, is_url, location_of, url_problem

SECRET = "hunter2"


class Clock:
    """Replaces `time` in the store: pauses between requests take no real time."""

    def __init__(self) -> None:
        self.skipped_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.skipped_s

    def sleep(self, seconds: float) -> None:
        self.skipped_s += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(remote_store, "time", made)
    return made


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "a.bin").write_bytes(bytes(range(256)) * 40)
    return tmp_path / "served"


def hostile(canary: Path) -> list[str]:
    """Texts that make some tool run a command or read another resource."""
    command = f"touch {canary}"
    return [
        f"pipe:{command}",
        f"pipe:{command} |",
        f"PIPE:{command}",
        f"file:///nowhere::pipe:{command}",
        f"simplecache::pipe:{command}",
        f"zip://a::http://127.0.0.1/{canary}",
        f"http://127.0.0.1/a::pipe:{command}",
        f"http://127.0.0.1/$({command})",
        f"http://127.0.0.1/`{command}`",
        f"http://127.0.0.1/a;{command}",
        f"http://127.0.0.1/{{000..003}}-{command}",
        f"http://127.0.0.1/a\npipe:{command}",
        f"s3://bucket/a\r\npipe:{command}",
        f"http://127.0.0.1/../{canary}",
        f"python:import os; os.system({command!r})",
        f"reference://{canary}",
        f"local://{canary}",
        f"ssh://-oProxyCommand={command}/a",
        f"data:text/plain,{command}",
        f"git+ext::sh -c {command}",
    ]


@pytest.mark.parametrize("number", range(len(hostile(Path()))))
def test_urls_that_other_tools_execute_are_refused(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    canary = tmp_path / "canary"
    # What webdataset and others rewrite URLs by; it must have no effect here.
    monkeypatch.setenv("GOPEN_REWRITE", f"http://=pipe:touch {canary} ;")
    monkeypatch.setenv("GOPEN_VERBOSE", "1")
    text = hostile(canary)[number]
    assert is_url(text) and url_problem(text)
    with pytest.raises(UserError) as caught:
        read_manifest(text)
    assert str(caught.value).startswith("data.path: ")
    assert not canary.exists()


def test_a_path_with_odd_characters_stays_a_path(tmp_path: Path) -> None:
    for name in (
        f"a::pipe:touch {tmp_path}/canary",
        "$(touch canary)",
        "{0..3}",
        "x\npipe:touch y",
    ):
        folder = tmp_path / name.replace("/", "_")
        assert location_of(str(folder)) == folder
        with pytest.raises(UserError, match="no such folder"):
            read_manifest(str(folder))
    assert location_of(f"file://{tmp_path}/a") == tmp_path / "a"
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    "text",
    [
        f"https://user:{SECRET}@host/shards",
        f"https://host/shards?X-Amz-Signature={SECRET}",
        f"s3://key:{SECRET}@bucket/shards",
        f"http://host/shards#{SECRET}",
    ],
)
def test_secrets_in_a_url_are_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(UserError, match="secrets") as caught:
        location_of(text)
    assert SECRET not in str(caught.value)
    assert SECRET not in redact(f"403, message='Forbidden', url='{text.partition('#')[0]}'")


@pytest.mark.parametrize(
    "folder, name, joined",
    [
        ("http://host/a/b/", "c 1.tar", "http://host/a/b/c%201.tar"),
        ("http://host", "c#1?.tar", "http://host/c%231%3F.tar"),
        ("s3://bucket/a", "../tars/c 1.tar", "s3://bucket/tars/c 1.tar"),
        ("s3://bucket/a", ".", "s3://bucket/a"),
        ("https://host/a", "pipe:touch x", "https://host/a/pipe%3Atouch%20x"),
    ],
)
def test_names_are_joined_below_a_host(folder: str, name: str, joined: str) -> None:
    assert str(Url.checked(folder, where="here") / name) == joined


@pytest.mark.parametrize("name", ["/etc/passwd", "../../other", "a\nb", "a/../../../b"])
def test_names_of_a_manifest_do_not_leave_the_bucket(name: str) -> None:
    with pytest.raises(UserError, match="is not a valid file name below a URL"):
        Url.checked("s3://bucket/a", where="here") / name


@pytest.mark.parametrize("fault", ["error", "drop", "short", "wrong", "missing", "slow"])
def test_a_transient_fault_is_retried_and_counted(folder: Path, fault: str) -> None:
    expected = (folder / "a.bin").read_bytes()[10:500]
    with served(folder, fault=lambda path, number: fault if number <= 3 else None) as server:
        store = RemoteStore(patience_s=PATIENCE_S)
        before = remote_counts().total()
        data = store.read(
            Url(server.url) / "a.bin", offset=10, num_bytes=490, is_valid=expected.__eq__
        )
        assert data == expected
        retries = remote_counts().total()["retries"] - before["retries"]
        # aiohttp itself repeats a request whose connection was closed.
        assert retries in {"slow": {0}, "drop": {1, 2, 3}}.get(fault, {3})


@pytest.mark.parametrize("fault", ["error", "drop", "short", "missing"])
def test_a_persistent_fault_ends_in_time_with_one_error(folder: Path, fault: str) -> None:
    with served(folder, fault=lambda path, number: fault) as server:
        with pytest.raises(RemoteStorageError, match=r"a\.bin: cannot be read .*; \d+ requests"):
            RemoteStore(patience_s=2.0).read(Url(server.url) / "a.bin", offset=0, num_bytes=9)
        assert server.requests["a.bin"] > 1


def test_a_refusal_is_not_repeated(folder: Path) -> None:
    with served(folder, fault=lambda path, number: "forbidden") as server:
        with pytest.raises(RemoteStorageError, match=r"a\.bin: cannot be read .*403.*; 1 requests"):
            RemoteStore(patience_s=PATIENCE_S).read(
                Url(server.url) / "a.bin", offset=0, num_bytes=9
            )
        assert server.requests["a.bin"] == 1


def test_messages_of_a_backend_are_redacted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(url: Url, *, timeout_s: float, **span: int) -> bytes:
        timeouts.append(timeout_s)
        raise OSError(f"GET https://key:{SECRET}@host/a.bin?se=1&blob={SECRET} failed")

    timeouts: list[float] = []
    monkeypatch.setattr(remote_store, "read_range", fail)
    with pytest.raises(RemoteStorageError) as caught:
        RemoteStore(patience_s=2.0).read(Url("http://host/a.bin"), offset=0, num_bytes=9)
    assert "GET https://host/a.bin?*** failed" in str(caught.value)
    assert SECRET not in str(caught.value)
    # Requests to a silent server are repeated several times within `patience_s`.
    assert len(timeouts) > 1 and max(timeouts) <= 0.5


def test_a_silent_server_is_an_error_in_time(folder: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = Url(f"http://127.0.0.1:{silent.getsockname()[1]}/a.bin")
        with pytest.raises(RemoteStorageError, match="cannot be read"):
            RemoteStore(patience_s=0.8).read(url, offset=0, num_bytes=9)


def test_bytes_that_are_always_wrong_are_damaged_not_unreachable(folder: Path) -> None:
    with served(folder) as server:
        with pytest.raises(DamagedError, match="9 bytes at 5"):
            RemoteStore(patience_s=PATIENCE_S).read(
                Url(server.url) / "a.bin", offset=5, num_bytes=9, is_valid=lambda data: False
            )
        assert server.requests["a.bin"] == 3


def test_a_server_without_ranges_differs_from_a_failing_one(folder: Path) -> None:
    with served(folder, fault=lambda path, number: "no_ranges") as server:
        with pytest.raises(UserError, match="no range requests") as caught:
            RemoteStore(patience_s=PATIENCE_S).check_ranges(Url(server.url) / "a.bin")
        assert not isinstance(caught.value, RemoteStorageError)


@pytest.mark.parametrize("fault", ["endless", "more"])
def test_only_one_byte_more_than_asked_for_is_read(folder: Path, fault: str) -> None:
    with served(folder, fault=lambda path, number: fault) as server:
        before = remote_counts().total()
        with pytest.raises(RemoteStorageError, match="for 9 bytes with more"):
            RemoteStore(patience_s=2.0).read(Url(server.url) / "a.bin", offset=5, num_bytes=9)
        assert remote_counts().total()["bytes"] == before["bytes"]
        # Per request what fits into the buffers of the connection.
        assert server.sent["a.bin"] < server.requests["a.bin"] * MORE_BYTES / 8


@pytest.mark.parametrize("fault", ["gzip", "endless_gzip"])
def test_an_encoded_answer_is_one_error(folder: Path, fault: str) -> None:
    with served(folder, fault=lambda path, number: fault) as server:
        with pytest.raises(UserError, match="Content-Encoding 'gzip'.*\n.*gzip off") as caught:
            RemoteStore(patience_s=PATIENCE_S).read(
                Url(server.url) / "a.bin", offset=5, num_bytes=9
            )
        assert not isinstance(caught.value, RemoteStorageError)
        assert server.requests["a.bin"] == 3
        server.fault = lambda path, number: fault if number % 3 else None
        data = RemoteStore(patience_s=PATIENCE_S).read(
            Url(server.url) / "a.bin", offset=5, num_bytes=2
        )
        assert data == bytes([5, 6])


def test_a_manifest_and_an_index_have_a_size_limit(folder: Path) -> None:
    with open(folder / "manifest.json", "wb") as file:
        file.truncate(MAX_MANIFEST_BYTES + 1)
    with served(folder) as server:
        with pytest.raises(UserError, match="too many for a manifest"):
            read_manifest(server.url)
        assert server.requests["manifest.json"] == 1  # its size alone
        with pytest.raises(UserError, match="too many for an index of 10 samples"):
            remote_index(
                Url(server.url) / "index.parquet",
                num_bytes=2 << 20,
                num_rows=10,
                blake3_hex="0" * 64,
                remote_settings=RemoteSettings(),
            )
        (folder / "manifest.json").write_bytes(b"[" * 100_000)
        with pytest.raises(UserError, match="is not a valid manifest"):
            read_manifest(server.url)
