"""Files behind URLs, read by range and with patience.

Owns: which URLs are read at all, their joining, what may be said of them in messages, requests,
repetitions and their counts. The only module that speaks to fsspec.
Leaves out: keeping what was read (`shard_cache`), samples (`remote_shards`).

fsspec understands schemes that run commands and chains of them (`pipe:`, `a::b`). Nothing of that
kind can be reached from here: a scheme is looked up in `SCHEMES`, and fsspec is given plain paths.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from multiprocessing.sharedctypes import RawArray
from random import SystemRandom
from typing import Any, TypeVar

from vitscale.config.errors import UserError
from vitscale.config.redaction import redact
from vitscale.data.remote.urls import SCHEMES, Url

# One request may take this share of the patience, so that a silent server is asked again.
SHARE_OF_ONE = 0.25
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
# The same wrong bytes so often are wrong where they are stored.
DAMAGED_READS = 3
# A server that answers so often with the whole file serves no ranges; some do so under load.
RANGE_TRIES = 3
SIZE_THREADS = 16
COUNTS = ("retries", "requests", "bytes", "cache_hits", "cache_failures")
# Of all processes of a rank; each writes into the row of its own process id.
COUNT_ROWS = 251

T = TypeVar("T")


class Damaged(OSError):
    """Bytes that are not those of the index, however often they are read."""


class WholeFile(OSError):
    """A range was asked for, and more came."""


class StorageError(UserError):
    """Remote storage that did not answer within the patience."""


class Counts:
    """What was asked of remote storage, by all processes that come from one."""

    def __init__(self) -> None:
        # Without a lock: a worker killed while it holds one would stop all others.
        self.rows = RawArray("d", COUNT_ROWS * len(COUNTS))

    def add(self, name: str, amount: float = 1) -> None:
        self.rows[os.getpid() % COUNT_ROWS * len(COUNTS) + COUNTS.index(name)] += amount

    def total(self) -> dict[str, float]:
        return {name: sum(self.rows[i :: len(COUNTS)]) for i, name in enumerate(COUNTS)}


@cache
def remote_counts() -> Counts:
    """Those of this process and of the workers it starts."""
    return Counts()


def remote_metrics() -> dict[str, float]:
    """`data/remote_...` since the start of this process; empty as long as all shards are local."""
    if not remote_counts.cache_info().currsize:
        return {}
    return {f"data/remote_{name}": value for name, value in remote_counts().total().items()}


class RemoteStore:
    """Reads of ranges, repeated until they succeed or `patience_s` is over."""

    def __init__(self, *, patience_s: float) -> None:
        self.patience_s = patience_s
        self.counts = remote_counts()

    def connect(self, url: Url) -> None:
        """Make this process's connection before several threads would each make one."""
        _filesystem(url.scheme, os.getpid())

    def read(
        self,
        url: Url,
        *,
        offset: int,
        num_bytes: int,
        is_right: Callable[[bytes], bool] = lambda data: True,
        patience_s: float | None = None,
    ) -> bytes:
        """Bytes of one range.

        is_right: says whether bytes are those that were stored.
        Raises StorageError when they cannot be had in time, Damaged when they are always wrong.
        """
        wrong: list[bytes] = []

        def once(timeout_s: float) -> bytes:
            data = _range(url, offset=offset, num_bytes=num_bytes, timeout_s=timeout_s)
            self.counts.add("bytes", len(data))
            if not is_right(data):
                wrong[:] = [*wrong, data] if data in wrong else [data]
                error = Damaged(f"{num_bytes} bytes at {offset} are not those of the index")
                if len(wrong) == DAMAGED_READS:
                    raise _Final(error)
                raise error
            return data

        return self._patiently(once, url, patience_s=patience_s or self.patience_s)

    def check_ranges(self, url: Url) -> None:
        """Raises UserError when the server answers a range with the whole file, StorageError."""
        tries = 0

        def once(timeout_s: float) -> None:
            nonlocal tries
            try:
                _range(url, offset=0, num_bytes=1, timeout_s=timeout_s)
            except WholeFile as error:
                tries += 1
                if tries < RANGE_TRIES:
                    raise
                next_step = "serve the shards from a server with range requests (nginx, S3, ...)"
                raise _Final(UserError(str(error), where=str(url), next_step=next_step)) from None

        self._patiently(once, url, patience_s=self.patience_s)

    def size(self, url: Url) -> int | None:
        """Bytes of a file; None: there is none. Raises StorageError."""

        def once(timeout_s: float) -> int | None:
            try:
                found = _call(url, "info", timeout_s=timeout_s)["size"]
            except FileNotFoundError as error:
                # fsspec says so of any failure over HTTP; the cause knows better.
                if error.__cause__ is not None and _status(error.__cause__) not in (404, 410):
                    raise error.__cause__ from None
                return None
            if found is None:
                raise OSError("the server does not tell the size of the file")
            return int(found)

        return self._patiently(once, url, patience_s=self.patience_s)

    def sizes(self, urls: Sequence[Url]) -> list[int | None]:
        """`size` of many, in the same order."""
        if not urls:
            return []
        self.connect(urls[0])
        pool = ThreadPoolExecutor(SIZE_THREADS)
        try:
            return list(pool.map(self.size, urls))
        finally:
            pool.shutdown(cancel_futures=True)

    def _patiently(self, once: Callable[[float], T], url: Url, *, patience_s: float) -> T:
        self.connect(url)  # the first time imports a good deal, which is no fault of the storage
        spent_s, pause_s, tries = 0.0, FIRST_PAUSE_S, 0
        said: Exception | None = None
        while True:
            timeout_s = min(patience_s - spent_s, SHARE_OF_ONE * patience_s)
            began = time.monotonic()
            self.counts.add("requests")
            tries += 1
            try:
                return once(timeout_s)
            except _Final as final:
                raise final.error from None
            except UserError:
                raise
            except Exception as error:  # every backend has its own kinds
                # The last request may have been cut short by the end of the patience.
                said = error if said is None or str(error) else said
                refused = isinstance(error, PermissionError) or _status(error) in (401, 403)
                # Of the system's randomness: processes forked from one would all pause alike.
                jittered = pause_s * SystemRandom().uniform(0.5, 1.5)
                # Longer than it was given takes a request only where this process stood still.
                spent_s += min(time.monotonic() - began, timeout_s) + jittered
                if refused or spent_s >= patience_s:
                    raise _unreachable(url, said, tries=tries, patience_s=patience_s) from None
            self.counts.add("retries")
            time.sleep(jittered)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


class _Final(Exception):
    """An error that no repetition would mend."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _unreachable(url: Url, error: Exception, *, tries: int, patience_s: float) -> StorageError:
    said = redact(str(error)) or "no answer"
    return StorageError(
        f"cannot be read ({type(error).__name__}: {said}); {tries} requests in at most "
        f"{patience_s:g} s",
        where=str(url),
        next_step="check address, network and credentials; to bear longer outages raise "
        "data.remote.patience_s (and data.timeout_s above it)",
    )


def _status(error: BaseException) -> int | None:
    """The HTTP status behind an error, where it has one."""
    status = getattr(error, "status", None)
    return status if isinstance(status, int) else None


def _range(url: Url, *, offset: int, num_bytes: int, timeout_s: float) -> bytes:
    span = {"start": offset, "end": offset + num_bytes}
    data = _call(url, "cat_file", timeout_s=timeout_s, **span) if num_bytes else b""
    if len(data) > num_bytes:
        raise WholeFile(f"answers a request for {num_bytes} bytes with {len(data)}: no range reads")
    if len(data) < num_bytes:
        raise OSError(f"ends after {offset + len(data)} bytes")
    return bytes(data)


def _call(url: Url, method: str, *, timeout_s: float, **arguments: Any) -> Any:
    from fsspec.asyn import sync

    filesystem = _filesystem(url.scheme, os.getpid())
    if filesystem.async_impl:
        function = getattr(filesystem, f"_{method}")
        return sync(filesystem.loop, function, url.text, timeout=timeout_s, **arguments)
    return getattr(filesystem, method)(url.text, **arguments)


@cache
def _filesystem(scheme: str, process: int) -> Any:
    """By process: connections and their thread do not survive a fork."""
    import fsspec

    package = SCHEMES[scheme]
    options: dict[str, Any] = dict(fsspec.config.conf.get(scheme, {}))
    if scheme in ("http", "https"):
        # Compressed on the way, ranges would count other bytes.
        options["headers"] = {"Accept-Encoding": "identity"} | options.get("headers", {})
        # Proxies and ~/.netrc, as other programs take them.
        options["client_kwargs"] = {"trust_env": True} | options.get("client_kwargs", {})
    try:
        filesystem = fsspec.filesystem(scheme, **options, skip_instance_cache=True)
    except ImportError:
        raise UserError(
            f"{scheme}:// needs the package {package}", next_step=f"pip install {package}"
        ) from None
    if scheme in ("http", "https"):
        from fsspec.asyn import sync

        sync(filesystem.loop, filesystem.set_session)  # not by two threads at once
    return filesystem
