"""Read byte ranges of remote files, with retries.

Owns: retries and their counts, and which errors end them.
Leaves out: single requests (`backends`), which URLs are allowed (`urls`), caching (`cache`),
samples (`shards`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from random import SystemRandom
from typing import TypeVar

from vitscale.config.errors import UserError
from vitscale.config.redaction import redact_queries
from vitscale.data.remote.backends import call, connect, read_range
from vitscale.data.remote.errors import EncodedError, NoRangesError
from vitscale.data.remote.urls import Url

# A request times out after this share of `patience_s`, so requests to a silent server repeat.
REQUEST_SHARE = 0.25
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
# The same wrong bytes in this many reads are damaged where they are stored.
DAMAGED_READS = 3
# A server serves no ranges if it sends the whole file this often; some do so once under load.
# Likewise a server that encodes its answers.
RANGE_TRIES = 3
SIZE_THREADS = 16
COUNTS = ("retries", "requests", "bytes", "cache_hits", "cache_failures")

T = TypeVar("T")


class DamagedError(OSError):
    """Bytes that do not have the expected hash, however often they are read."""


class RemoteStorageError(UserError):
    """Remote storage gave no valid answer in time."""


class RemoteCounts:
    """Counts of requests of a process and its workers, which report theirs with each batch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(COUNTS, 0.0)

    def add(self, name: str, amount: float = 1) -> None:
        with self._lock:
            self._counts[name] += amount

    def total(self) -> dict[str, float]:
        with self._lock:
            return dict(self._counts)

    def take(self) -> dict[str, float]:
        """The counts since the last call, other than 0."""
        with self._lock:
            counts, self._counts = self._counts, dict.fromkeys(COUNTS, 0.0)
        return {name: amount for name, amount in counts.items() if amount}


@cache
def remote_counts() -> RemoteCounts:
    """Counts of this process and the workers it starts."""
    return RemoteCounts()


def take_counts() -> dict[str, float] | None:
    """In a worker: the counts to report; None if nothing is remote."""
    return remote_counts().take() if remote_counts.cache_info().currsize else None


def add_counts(reported: dict[str, float]) -> None:
    """Add what a worker reports."""
    for name, amount in reported.items():
        remote_counts().add(name, amount)


def remote_metrics() -> dict[str, float]:
    """`vitals/remote_...` since the start of this process; empty if all shards are local."""
    if not remote_counts.cache_info().currsize:
        return {}
    return {f"vitals/remote_{name}": value for name, value in remote_counts().total().items()}


def _store_with(patience_s: float) -> RemoteStore:
    return RemoteStore(patience_s=patience_s)


class RemoteStore:
    """Reads ranges; retries until success or until `patience_s` is spent."""

    def __init__(self, *, patience_s: float) -> None:
        self.patience_s = patience_s
        self.counts = remote_counts()

    def __reduce__(self) -> tuple[Callable[[float], RemoteStore], tuple[float]]:
        # The counts of a process stay its own.
        return _store_with, (self.patience_s,)

    def connect(self, url: Url) -> None:
        """Open this process's connection, before several threads each open one."""
        connect(url)

    def read(
        self,
        url: Url,
        *,
        offset: int,
        num_bytes: int,
        is_valid: Callable[[bytes], bool] = lambda data: True,
        patience_s: float | None = None,
    ) -> bytes:
        """Bytes of one range.

        is_valid: checks the bytes.
        Raises RemoteStorageError if they cannot be read in time, DamagedError if they stay wrong.
        """
        wrong: list[bytes] = []
        num_encoded = 0

        def attempt(timeout_s: float) -> bytes:
            nonlocal num_encoded
            try:
                data = read_range(url, offset=offset, num_bytes=num_bytes, timeout_s=timeout_s)
            except EncodedError as encoded:
                num_encoded += 1
                if num_encoded < RANGE_TRIES:
                    raise
                next_step = (
                    "switch compression off for these files (nginx: gzip off; in a bucket remove "
                    "their Content-Encoding)"
                )
                raise _final(encoded, url, next_step=next_step) from None
            self.counts.add("bytes", len(data))
            if not is_valid(data):
                wrong[:] = [*wrong, data] if data in wrong else [data]
                error = DamagedError(f"{num_bytes} bytes at {offset} have the wrong hash")
                if len(wrong) == DAMAGED_READS:
                    raise _NotRetryable(error)
                raise error
            return data

        return self._retry(attempt, url, patience_s=patience_s or self.patience_s)

    def check_ranges(self, url: Url) -> None:
        """Check that the server answers requests for ranges.

        Raises UserError if it ignores them and sends whole files, RemoteStorageError.
        """
        tries = 0

        def attempt(timeout_s: float) -> None:
            nonlocal tries
            try:
                read_range(url, offset=0, num_bytes=1, timeout_s=timeout_s)
            except NoRangesError as error:
                tries += 1
                if tries < RANGE_TRIES:
                    raise
                next_step = "use a server that supports range requests (nginx, S3, ...)"
                raise _final(error, url, next_step=next_step) from None

        self._retry(attempt, url, patience_s=self.patience_s)

    def size(self, url: Url) -> int | None:
        """Size of a file in bytes; None: no such file. Raises RemoteStorageError."""

        def attempt(timeout_s: float) -> int | None:
            try:
                found = call(url, "info", timeout_s=timeout_s)["size"]
            except FileNotFoundError as error:
                # fsspec raises this for any HTTP failure; the cause has the status.
                if error.__cause__ is not None and _status(error.__cause__) not in (404, 410):
                    raise error.__cause__ from None
                return None
            if found is None:
                raise OSError("the server does not send the size of the file")
            return int(found)

        return self._retry(attempt, url, patience_s=self.patience_s)

    def sizes(self, urls: Sequence[Url]) -> list[int | None]:
        """Sizes of many files, in the same order."""
        if not urls:
            return []
        self.connect(urls[0])
        pool = ThreadPoolExecutor(SIZE_THREADS)
        try:
            return list(pool.map(self.size, urls))
        finally:
            pool.shutdown(cancel_futures=True)

    def names(self, folder: Url) -> list[str]:
        """Names of the files directly below a URL. Raises RemoteStorageError."""

        def attempt(timeout_s: float) -> list[str]:
            found = call(folder, "ls", timeout_s=timeout_s, detail=True)
            files = [entry["name"] for entry in found if entry["type"] == "file"]
            return [name.rpartition("/")[2] for name in files]

        return self._retry(attempt, folder, patience_s=self.patience_s)

    def _retry(self, attempt: Callable[[float], T], url: Url, *, patience_s: float) -> T:
        self.connect(url)  # not counted: the first call imports a lot
        spent_s, pause_s, tries = 0.0, FIRST_PAUSE_S, 0
        last_error: Exception | None = None
        while True:
            timeout_s = min(patience_s - spent_s, REQUEST_SHARE * patience_s)
            began = time.monotonic()
            self.counts.add("requests")
            tries += 1
            try:
                return attempt(timeout_s)
            except _NotRetryable as final:
                raise final.error from None
            except UserError:
                raise
            except Exception as error:  # every backend has its own kinds
                # A timeout has no text: keep the last error that has one.
                last_error = error if last_error is None or str(error) else last_error
                refused = isinstance(error, PermissionError) or _status(error) in (401, 403)
                # System randomness: workers are forks of one server and would pause equally long.
                jittered = pause_s * SystemRandom().uniform(0.5, 1.5)
                # A request exceeds its timeout only if this process was suspended.
                spent_s += min(time.monotonic() - began, timeout_s) + jittered
                if refused or spent_s >= patience_s:
                    raise _unreachable(
                        url, last_error, tries=tries, patience_s=patience_s
                    ) from None
            self.counts.add("retries")
            time.sleep(jittered)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


class _NotRetryable(Exception):
    """Wraps an error that a retry cannot fix."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _final(error: Exception, url: Url, *, next_step: str) -> _NotRetryable:
    return _NotRetryable(UserError(str(error), where=str(url), next_step=next_step))


def _unreachable(
    url: Url, error: Exception, *, tries: int, patience_s: float
) -> RemoteStorageError:
    text = redact_queries(str(error)) or "no answer"
    return RemoteStorageError(
        f"cannot be read ({type(error).__name__}: {text}); {tries} requests in at most "
        f"{patience_s:g} s",
        where=str(url),
        next_step="check address, network and credentials; to tolerate longer outages raise "
        "data.remote.patience_s",
    )


def _status(error: BaseException) -> int | None:
    """The HTTP status of an error, if it has one."""
    status = getattr(error, "status", None)
    return status if isinstance(status, int) else None
