"""Shards at a URL: which are read, what is tried again, what the cache keeps, and the same run."""

import json
import multiprocessing
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from blake3 import blake3

from tests.support.corpora.shard_folders import write_shard_folder
from tests.support.loader_runs import Run
from tests.support.range_server import RangeServer, served
from tests.support.tables import every, refused, rows
from tests.support.waiting import wait_until
from vitscale.config.errors import FailureKind, StorageError, UserError
from vitscale.data import remote
from vitscale.data.index import MANIFEST_NAME, read_manifest, read_split
from vitscale.data.remote import (
    RemoteFile,
    Url,
    is_url,
    location_of,
    locked,
    names_below,
    open_cache,
    prefetch,
    prefix_of_hash,
    read_chunks,
)

# In the refused URLs and in a backend's message; no output may show it.
SECRET = "hunter2"

STEPS = 4


class Clock:
    """Replaces `time`: pauses between requests take no real time."""

    time = staticmethod(time.time)
    skipped_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.skipped_s

    def sleep(self, seconds: float):
        self.skipped_s += seconds


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(remote, "time", Clock())
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("remote") / "bucket"
    write_shard_folder(made, num_per_class=40, num_shards=20)

    # All byte values, and more than one request reads.
    (made / "a.bin").write_bytes(bytes(range(256)) * 40)
    return made


@pytest.fixture
def server(folder) -> Iterator[RangeServer]:
    with served(folder) as running:
        yield running


# Texts that make some tool run a command or read another resource, or that have secrets.
REFUSED = yaml.safe_load(r"""
- "pipe:COMMAND"
- "pipe:COMMAND |"
- "PIPE:COMMAND"
- "file:///nowhere::pipe:COMMAND"
- "simplecache::pipe:COMMAND"
- "zip://a::http://127.0.0.1/x"
- "http://127.0.0.1/a::pipe:x"
- "http://127.0.0.1/$(COMMAND)"
- "http://127.0.0.1/`COMMAND`"
- "http://127.0.0.1/a;COMMAND"
- "http://127.0.0.1/{000..003}-x"
- "http://127.0.0.1/a\npipe:COMMAND"
- "s3://bucket/a\r\npipe:COMMAND"
- "http://127.0.0.1/../x"
- "python:import os"
- "data:text/x"
- "reference://x"
- "local://x"
- "ssh://-oProxyCommand=COMMAND/a"
- "git+ext::sh -c COMMAND"
- "http:///x"
- "http:x"
- "https://user:hunter2@host/x"
- "s3://key:hunter2@bucket/x"
- "https://host/x?X-Amz-Signature=hunter2"
- "http://host/x#hunter2"
""")


def test_urls_with_commands_or_secrets_are_refused_and_not_repeated(
    tmp_path, monkeypatch
):
    # What webdataset and others rewrite URLs by; it must have no effect here.
    monkeypatch.setenv("GOPEN_REWRITE", f"http://=pipe:touch {tmp_path}/canary ;")
    for text in REFUSED:
        text = text.replace("COMMAND", f"touch {tmp_path}/canary")
        assert is_url(text), text
        with refused(r"^data\.path: is not a plain URL") as caught:
            read_manifest(text)
        assert SECRET not in str(caught.value)

    # Paths of this machine are no URLs, whatever they contain.
    for name in (
        "a::pipe:touch canary",
        "$(touch canary)",
        "{0..3}",
        "x\npipe:touch y",
    ):
        with refused("no such folder"):
            read_manifest(str(tmp_path / name))
    assert location_of(f"file://{tmp_path}/a") == tmp_path / "a"

    # COMMAND makes this file, and nothing may have run it.
    assert not (tmp_path / "canary").exists()


# Signs that mean something in HTTP are quoted, in a bucket not; ".." ends at the bucket.
@rows("""
- [folder, name, joined]
- ["http://host/a/b/", "c#1? .tar", "http://host/a/b/c%231%3F%20.tar"]
- ["https://host/a", "pipe:touch x", "https://host/a/pipe%3Atouch%20x"]
- ["s3://bucket/a", "../tars/c 1.tar", "s3://bucket/tars/c 1.tar"]
- ["s3://bucket/a", ".", "s3://bucket/a"]
- ["s3://bucket/a", "../../../other", "s3://bucket/other"]
- ["s3://bucket", "/etc/passwd", "s3://bucket/etc/passwd"]
""")
def test_names_are_joined_and_stay_on_their_host(folder, name, joined):
    assert str(location_of(folder) / name) == joined


def test_an_external_manifest_cannot_name_other_places(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    path = copy / MANIFEST_NAME
    text = json.loads(path.read_text())

    for root, message in (
        (f"pipe:touch {tmp_path}/canary", "is not a plain URL"),
        (f"http://127.0.0.1/a::pipe:touch {tmp_path}/canary", "is not a plain URL"),
        ("/somewhere/else", "a path on one machine"),
    ):
        path.write_text(json.dumps(text | {"shards_root": root}))
        with served(copy) as server, refused(message):
            read_split(server.url, split="train")
    assert not (tmp_path / "canary").exists()


# ---- requests ------------------------------------------------------------------------------------


def content_of(url: str, name: str = "a.bin") -> bytes:
    return b"".join(read_chunks(Url(url) / name))


@every(fault="error, drop, short, no_ranges, slow")
def test_a_transient_fault_is_retried(folder, server, fault, monkeypatch):
    monkeypatch.setattr(remote, "CHUNK_BYTES", 4000)

    # Two requests of three fail, so each piece is asked for again.
    server.fault = lambda path, number: fault if number % 3 else None
    assert content_of(server.url) == (folder / "a.bin").read_bytes()

    # Compressed answers would shift the ranges.
    assert server.encodings == {"identity"}


# What often passes is asked for until the time is over; a clear refusal once.
@rows(r"""
- [fault, kind, text]
- [error, storage, '50[03].*; [1-9]\d requests']
- [short, storage, '; [1-9]\d requests']
- [no_ranges, storage, 'must support range requests.*; [1-9]\d requests']
- [forbidden, storage, 403.*; 1 requests]
- [missing, bad input, ; 1 requests]
""")
def test_a_lasting_fault_is_one_error(server, fault, kind, text, capsys):
    """In time, and said meanwhile; a refusal at once."""
    server.fault = lambda path, number: fault
    with refused(rf"a\.bin: cannot be read .*{text}") as caught:
        list(read_chunks(Url(server.url) / "a.bin", 9))
    assert caught.value.kind == kind

    # Whoever waits for minutes must know for what.
    is_retried = "; 1 requests" not in text
    messages = capsys.readouterr().err
    assert messages.count("retrying for 120 s") == is_retried


# Nothing at all, half a pair of keys, and a profile that no file has.
@rows("""
- [variable, value]
- [HOME, /none]
- [AWS_ACCESS_KEY_ID, a]
- [AWS_PROFILE, none]
""")
def test_missing_credentials_are_an_error_at_once(variable, value, monkeypatch):
    # What this machine is set up with must not answer.
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", "/none")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv(variable, value)
    with pytest.raises(StorageError, match=r"(Credentials|Profile).*; 1 requests"):
        list(read_chunks(Url("s3://bucket/a.bin"), 9))


@pytest.mark.slow
@every(scheme="s3, gs")
def test_buckets_answer_with_what_was_asked_for(scheme, folder, monkeypatch):
    """Through the real client libraries."""
    import fsspec

    monkeypatch.setattr(remote, "CHUNK_BYTES", 4000)
    keys = {"token": "anon"}
    if scheme == "s3":
        keys = {"key": "key", "secret": "secret"}
    with served(folder.parent) as server:
        # The server stands for the cloud: the first part of a path is the bucket.
        settings = keys | {"endpoint_url": server.url}
        monkeypatch.setitem(fsspec.config.conf, scheme, settings)
        bucket = f"{scheme}://bucket"
        assert content_of(bucket) == (folder / "a.bin").read_bytes()

        # A missing object is an answer, not a fault to wait for.
        with pytest.raises(UserError) as caught:
            content_of(bucket, "b.bin")
        assert caught.value.kind == FailureKind.BAD_INPUT

        names = names_below(Url(bucket))
        assert sorted(names) == sorted(path.name for path in folder.iterdir())


def test_messages_of_a_backend_are_redacted(monkeypatch):
    """A key before the host, and a signed link."""

    class Failing:
        def cat_file(self, url, **span):
            signed = f"https://key:{SECRET}@host/a.bin?se=1&blob={SECRET}"
            raise OSError(f"GET {signed} failed")

    monkeypatch.setattr(remote, "_filesystem", lambda scheme: Failing())
    message = r"GET https://host/a.bin\?\*\*\* failed"
    with pytest.raises(StorageError, match=message) as caught:
        list(read_chunks(Url("http://host/a.bin"), 9))
    assert SECRET not in str(caught.value)


def test_a_silent_server_is_an_error_in_time(monkeypatch):
    # Real time here: the limit of a request, and that of all attempts together.
    monkeypatch.setattr(remote, "PATIENCE_S", 0.8)
    monkeypatch.setattr(remote, "REQUEST_S", 0.2)
    # It accepts connections and never answers.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        _, port = silent.getsockname()
        url = Url(f"http://127.0.0.1:{port}/a.bin")
        with pytest.raises(StorageError, match="cannot be read"):
            list(read_chunks(url, 9))


# ---- the cache -----------------------------------------------------------------------------------

SIZE = 1000


def content(number: int) -> bytes:
    return bytes([number]) * SIZE


@pytest.fixture
def log(tmp_path, monkeypatch) -> Path:
    """Numbers of the files that are asked for; number 99 has wrong bytes."""
    path = tmp_path / "log"

    # A file, because other processes ask, too.
    path.touch()

    def answered(url, num_bytes):
        number = int(url.rpartition("/")[2])
        with open(path, "a") as file:
            file.write(f"{number}\n")
        stored = 98 if number == 99 else number
        return [content(stored)]

    monkeypatch.setattr(remote, "read_chunks", answered)
    return path


def requests(log: Path) -> list[int]:
    return sorted(map(int, log.read_text().split()))


class Cache:
    """Files by number in the folder of a cache for `num_files` of them."""

    def __init__(self, path: Path, num_files: float = 3):
        self.folder = open_cache(str(path / "cache"))
        self.max_bytes = int(num_files * SIZE)

    def file(self, number: int) -> RemoteFile:
        url = Url(f"s3://bucket/{number}")
        digest = blake3(content(number)).hexdigest()
        return RemoteFile(url, SIZE, digest, self.folder, self.max_bytes)

    def held(self) -> list[int | str]:
        """Numbers of the files in the cache; what is no such file by its name."""
        numbers = {self.file(number).blake3_hex: number for number in range(100)}
        names = [path.name for path in self.folder.iterdir() if path.suffix != ".lock"]
        return sorted(numbers.get(name, name) for name in names)

    def use(self, number: int, *, seconds_ago: float):
        then = time.time() - seconds_ago
        os.utime(self.file(number).path(), (then, then))

    def read(self, number: int) -> bytes:
        piece = {"offset": 5, "num_bytes": 7}
        expected = prefix_of_hash(content(number)[5:12])
        return self.file(number).read(**piece, hash_prefix=expected)


@pytest.fixture
def cache(tmp_path, log) -> Cache:
    return Cache(tmp_path)


def test_the_least_recently_used_file_is_evicted_first(cache):
    for number in range(3):
        cache.use(number, seconds_ago=100 - number)
    assert cache.read(0) == content(0)[5:12]  # used just now

    # Room for three: one must go, and it is not the one that was read.
    cache.file(3).path()
    assert cache.held() == [0, 2, 3]


def test_a_prefetch_evicts_nothing_in_use(cache):
    for number in range(3):
        cache.use(number, seconds_ago=0)

    # Only this one has not been used for long.
    cache.use(0, seconds_ago=remote.IDLE_S + 1)
    prefetch([cache.file(number) for number in (1, 3, 4)])
    wait_until(lambda: not remote._prefetching.is_alive())

    assert cache.held() == [1, 2, 3]


def test_damage_is_fetched_again_and_never_kept(cache, log):
    """On the local disk, and where the bytes are stored."""

    shard = cache.file(1)
    for damage in (b"x" * SIZE, b""):
        shard.path().write_bytes(damage)
        assert cache.read(1) == content(1)[5:12]

    # The part that a sample reads is sound, so only a check of the whole file tells.
    shard.path().write_bytes(content(1)[:-1] + b"x")
    assert shard.verified().read_bytes() == content(1)
    assert requests(log) == [1] * 4

    # Sound bytes that are not those of the index: a new download does not help.
    with pytest.raises(OSError, match="do not have the hash in the index"):
        shard.read(offset=5, num_bytes=7, hash_prefix=0)

    # Wrong where they are stored: tried a few times, and nothing of it stays.
    log.write_text("")
    with refused("bucket/99: cannot be read: its bytes do not have"):
        cache.file(99).path()
    assert cache.held() == []
    assert requests(log) == [99] * remote.DAMAGED_READS


def test_a_cache_that_cannot_keep_a_file_is_one_error(tmp_path, log):
    """No sample is replaced for it."""
    # Larger than the whole cache; a cache that is a file; and no cache at all.
    with refused("bucket/1 cannot be kept there .*no space for 1000 bytes"):
        Cache(tmp_path, num_files=0.5).read(1)
    with refused(r"data.remote.cache_path=.*cannot be written"):
        Cache(log)
    with refused("fetched to a local disk first"):
        open_cache(None)


def test_partial_files_of_a_killed_process_are_removed(cache):
    # What a killed process leaves: the beginning of a download, under its own name.
    left = cache.folder / f"{cache.file(1).blake3_hex}.part"
    left.write_bytes(content(0))

    for number in (2, 3):
        cache.file(number).path()
    assert left.exists()  # another process may be fetching it

    # So old that no process can be at work on it.
    os.utime(left, (0, 0))
    cache.file(4).path()
    assert cache.held() == [2, 3, 4]

    # Whoever needs this very file holds its lock, so the part is nobody's.
    left.write_bytes(content(0))
    assert cache.file(1).path().read_bytes() == content(1)
    assert not left.exists()


def _fetch_all(cache: Cache, first: int, sizes: Path):
    """Fetch all files in another process, and write down the cache's size after each."""
    for number in [*range(first, 6), *range(first)]:
        cache.file(number).path()
        inodes = {}  # by inode: a file renamed during the listing may appear twice
        with locked(cache.folder, "space"):
            for entry in os.scandir(cache.folder):
                # Others end their downloads meanwhile.
                with suppress(FileNotFoundError):
                    inodes[entry.inode()] = entry.stat().st_size
        with open(sizes, "a") as log:
            log.write(f"{sum(inodes.values())}\n")


# A cache for all files, and one that evicts all the time.
@every(limit="100, 4")
def test_many_processes_fetch_each_file_once_and_keep_the_size(tmp_path, log, limit):
    # A fork inherits the patched requests.
    context = multiprocessing.get_context("fork")
    cache = Cache(tmp_path, num_files=limit)
    sizes = tmp_path / "sizes"
    processes = [
        context.Process(target=_fetch_all, args=(cache, first, sizes))
        for first in range(4)
    ]

    for process in processes:
        process.start()
    for process in processes:
        process.join()

    assert [process.exitcode for process in processes] == [0] * 4
    assert max(map(int, sizes.read_text().split())) <= limit * SIZE
    if limit == 100:
        assert requests(log) == list(range(6))

    # A loader worker started during a download inherits the descriptor of the lock.
    with locked(cache.folder, "space"):
        child = context.Process(target=signal.pause)
        child.start()
    with locked(cache.folder, "space", wait=False):  # the child does not keep it
        child.kill()


# ---- the same run as of local shards -------------------------------------------------------------


def batches_of(
    run: Run, *, ranks: int = 1, workers: int = 0, start: int = 0, stop: int = STEPS
) -> list[list[bytes]]:
    """Read a run in any layout; a step takes 24 images from most of the 20 tars."""
    return run.batches(
        ranks=ranks,
        workers=workers,
        start=start,
        stop=stop,
    )


@pytest.fixture(scope="module")
def undisturbed(folder) -> list[list[bytes]]:
    return batches_of(Run(folder))


@pytest.fixture
def run(server, tmp_path) -> Run:
    return Run(server.url, {"remote": {"cache_path": str(tmp_path / "cache")}})


def flaky(path: str, number: int) -> str | None:
    """Every fault, one request in two."""
    if not path.endswith(".tar"):
        return None
    faults = ("error", None, "drop", None, "short", "wrong", None, "slow", None, None)
    return faults[number % len(faults)]


def test_every_layout_gives_the_batches_of_local_shards(
    run, server, undisturbed, tmp_path
):
    server.fault = flaky
    # Resumed on another layout, with the cache of the first.
    batches = batches_of(run, stop=1)
    batches += batches_of(
        run,
        ranks=3,
        workers=2,
        start=1,
    )
    assert batches == undisturbed

    # Files are named by their hash of 64 digits.
    cached = [path for path in (tmp_path / "cache").iterdir() if len(path.name) == 64]
    assert len(cached) > 15
    for path in cached:  # damage on the local disk is found and fetched again
        path.write_bytes(b"x" * path.stat().st_size)
    assert batches_of(run, workers=1) == undisturbed


def test_each_shard_is_prefetched_once_within_the_cache_size(
    run, server, undisturbed, tmp_path
):
    # In this process: workers end in the middle of a fetch, which another then begins again.
    assert batches_of(run, stop=1) == undisturbed[:1]

    # Two blocks of 16 fit; the second is fetched while the first is read.
    settings = run.settings(0).remote
    index = read_split(server.url, split="train", remote_settings=settings)
    files = [index.tar(shard) for shard in range(index.entry.num_tars)]

    def are_fetched():
        prefetch(files)  # as each batch asks for it
        cache = tmp_path / "cache"
        return all((cache / file.blake3_hex).exists() for file in files)

    wait_until(are_fetched)

    sent = dict(server.sent)
    # Not a byte more than the tars have.
    tars = sum(num for name, num in sent.items() if name.endswith(".tar"))
    assert tars == sum(file.num_bytes for file in files)
    assert batches_of(run, ranks=3, workers=1) == undisturbed

    # All from the cache but the manifest.
    read_again = {name for name, num in server.sent.items() if num != sent[name]}
    assert read_again == {MANIFEST_NAME}


@rows("""
- [workers, fault]
- [0, error]
- [2, missing]
""")
def test_an_outage_ends_the_run_and_names_the_shard(run, server, workers, fault):
    """An outage is no bit rot: substituting would make runs non-deterministic."""
    server.fault = lambda path, number: fault if path.endswith(".tar") else None
    with refused(r"(?s)train-0000\d\d\.tar: cannot be read.*requests"):
        batches_of(run, workers=workers)
