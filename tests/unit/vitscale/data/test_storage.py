"""Allowed and refused URLs; retries of requests."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from tests.support.range_server import served
from vitscale.config.errors import StorageError, UserError
from vitscale.config.redaction import redact
from vitscale.data import storage
from vitscale.data.index import MAX_MANIFEST_BYTES, read_manifest
from vitscale.data.storage import (
    Url,
    is_url,
    location_of,
    names_below,
    read_range,
    size_of,
    url_problem,
)

SECRET = "hunter2"


class Clock:
    """Replaces `time`: pauses between requests take no real time."""

    def __init__(self) -> None:
        self.skipped_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.skipped_s

    def sleep(self, seconds: float) -> None:
        self.skipped_s += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(storage, "time", made)
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


@pytest.mark.parametrize("fault", ["error", "drop", "short", "no_ranges", "slow"])
def test_a_transient_fault_is_retried(folder: Path, fault: str) -> None:
    expected = (folder / "a.bin").read_bytes()[10:500]
    with served(folder, fault=lambda path, number: fault if number <= 2 else None) as server:
        assert read_range(Url(server.url) / "a.bin", offset=10, num_bytes=490) == expected
        assert server.encodings == {"identity"}


@pytest.mark.parametrize(
    ("fault", "num_requests"),
    [("error", "[1-9]\\d"), ("drop", "[1-9]\\d"), ("short", "[1-9]\\d")]
    + [("forbidden", "1"), ("missing", "1")],
)
def test_a_lasting_fault_is_one_error(folder: Path, fault: str, num_requests: str) -> None:
    """In time; a refusal at once."""
    with served(folder, fault=lambda path, number: fault) as server:
        with pytest.raises(StorageError, match=rf"a\.bin: cannot be read .*; {num_requests} req"):
            read_range(Url(server.url) / "a.bin", offset=0, num_bytes=9)


def test_sizes_are_known_or_missing(folder: Path) -> None:
    with served(folder) as server:
        url = Url(server.url)
        assert (size_of(url / "a.bin"), size_of(url / "b.bin")) == (10_240, None)
        server.fault = lambda path, number: "forbidden"
        with pytest.raises(StorageError, match="403"):
            size_of(url / "a.bin")


def test_a_bucket_is_listed() -> None:
    import fsspec

    bucket = fsspec.filesystem("memory")
    bucket.pipe("/listed/a.tar", b"1")
    bucket.pipe("/listed/more/b.tar", b"2")
    assert names_below(Url("memory://listed")) == ["a.tar"]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_buckets_answer_with_what_was_asked_for(
    scheme: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the real client libraries."""
    import fsspec

    keys = {"key": "key", "secret": "secret"} if scheme == "s3" else {"token": "anon"}
    with served(folder.parent) as server:
        monkeypatch.setitem(fsspec.config.conf, scheme, {"endpoint_url": server.url} | keys)
        storage._filesystem.cache_clear()
        url = Url(f"{scheme}://served")
        assert read_range(url / "a.bin", offset=5, num_bytes=9) == bytes(range(5, 14))
        assert (size_of(url / "a.bin"), size_of(url / "b.bin")) == (10_240, None)
        assert names_below(url) == ["a.bin"]


def test_messages_of_a_backend_are_redacted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(url: Url, method: str, **span: int) -> bytes:
        raise OSError(f"GET https://key:{SECRET}@host/a.bin?se=1&blob={SECRET} failed")

    monkeypatch.setattr(storage, "_call", fail)
    with pytest.raises(StorageError) as caught:
        read_range(Url("http://host/a.bin"), offset=0, num_bytes=9)
    assert "GET https://host/a.bin?*** failed" in str(caught.value)
    assert SECRET not in str(caught.value)


def test_a_silent_server_is_an_error_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "PATIENCE_S", 0.8)
    monkeypatch.setattr(storage, "REQUEST_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = Url(f"http://127.0.0.1:{silent.getsockname()[1]}/a.bin")
        with pytest.raises(StorageError, match="cannot be read"):
            read_range(url, offset=0, num_bytes=9)


def test_a_server_without_ranges_differs_from_a_failing_one(folder: Path) -> None:
    with served(folder, fault=lambda path, number: "no_ranges") as server:
        with pytest.raises(UserError, match="no range requests") as caught:
            read_range(Url(server.url) / "a.bin", offset=5, num_bytes=9)
        assert not isinstance(caught.value, StorageError)


def test_a_manifest_has_a_size_limit(folder: Path) -> None:
    with open(folder / "manifest.json", "wb") as file:
        file.truncate(MAX_MANIFEST_BYTES + 1)
    with served(folder) as server:
        with pytest.raises(UserError, match="too many for a manifest"):
            read_manifest(server.url)
        assert server.requests["manifest.json"] == 1  # its size alone
        (folder / "manifest.json").write_bytes(b"[" * 100_000)
        with pytest.raises(UserError, match="is not a valid manifest"):
            read_manifest(server.url)
