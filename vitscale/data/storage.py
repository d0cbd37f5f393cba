"""Read files at URLs through fsspec, with retries. The only module that calls it.

Leaves out: which URLs are allowed (`urls`), local copies (`cache`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache
from random import SystemRandom
from typing import Any, TypeVar

from vitscale.config.errors import UserError
from vitscale.config.redaction import redact_queries
from vitscale.data.urls import SCHEMES, Url

# Time limit of one read, retries included, after which the run ends; of one request.
PATIENCE_S, REQUEST_S = 120.0, 30.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
# A server serves no ranges if it sends more than asked this often; some do so once under load.
RANGE_TRIES = 3

T = TypeVar("T")


class RemoteStorageError(UserError):
    """Remote storage gave no valid answer in time."""


class _MoreThanAskedError(OSError):
    pass


def read_range(url: Url, *, offset: int, num_bytes: int) -> bytes:
    """Bytes of one range. Raises RemoteStorageError; UserError if the server serves no ranges."""
    num_more = 0

    def attempt() -> bytes:
        nonlocal num_more
        span = {"start": offset, "end": offset + num_bytes}
        data = bytes(_call(url, "cat_file", **span)) if num_bytes else b""
        if len(data) > num_bytes:
            num_more += 1
            if num_more < RANGE_TRIES:
                raise _MoreThanAskedError
            raise UserError(
                f"answers a request for {num_bytes} bytes with more: no range requests",
                where=str(url),
                next_step="use a server that supports range requests (nginx, S3, ...)",
            )
        if len(data) < num_bytes:
            raise OSError(f"ends after {offset + len(data)} bytes")
        return data

    return _retried(attempt, url)


def size_of(url: Url) -> int | None:
    """Size of a file in bytes; None: no such file. Raises RemoteStorageError."""

    def attempt() -> int | None:
        try:
            found = _call(url, "info")["size"]
        except FileNotFoundError as error:
            if not _is_missing(error):
                raise (error.__cause__ or error) from None
            return None
        if found is None:
            raise OSError("the server does not send the size of the file")
        return int(found)

    return _retried(attempt, url)


def names_below(folder: Url) -> list[str]:
    """Names of the files directly below a URL. Raises RemoteStorageError."""

    def attempt() -> list[str]:
        found = _call(folder, "ls", detail=True)
        return [each["name"].rpartition("/")[2] for each in found if each["type"] == "file"]

    return _retried(attempt, folder)


def _retried(attempt: Callable[[], T], url: Url) -> T:
    """Raises RemoteStorageError after `PATIENCE_S`; at once where the file is refused or missing.

    UserErrors pass.
    """
    pause_s, tries = FIRST_PAUSE_S, 0
    _filesystem(url.scheme, os.getpid())  # not counted: the first call imports a lot
    start, last_error = time.monotonic(), OSError("no answer")
    while True:
        tries += 1
        try:
            return attempt()
        except UserError:
            raise
        except Exception as error:  # every backend has its own kinds
            # A timeout has no text: keep the last error that has one.
            last_error = error if str(error) or tries == 1 else last_error  # type: ignore[assignment]  # see above
            final = isinstance(error, PermissionError) or _status(error) in (401, 403)
            final = final or (isinstance(error, FileNotFoundError) and _is_missing(error))
            spent_s = time.monotonic() - start
            if final or spent_s + pause_s > PATIENCE_S:
                text = redact_queries(str(last_error)) or "no answer"
                raise RemoteStorageError(
                    f"cannot be read ({type(last_error).__name__}: {text}); {tries} requests in "
                    f"{spent_s:.0f} s",
                    where=str(url),
                    next_step="check address, network and credentials, then run the same command "
                    "again",
                ) from None
        # System randomness: workers are forks of one server and would pause equally long.
        time.sleep(pause_s * SystemRandom().uniform(0.5, 1.5))
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _is_missing(error: FileNotFoundError) -> bool:
    """fsspec raises it for any HTTP failure; the cause has the status."""
    return error.__cause__ is None or _status(error.__cause__) in (404, 410)


def _status(error: BaseException) -> int | None:
    """The HTTP status of an error, if it has one."""
    status = getattr(error, "status", None)
    return status if isinstance(status, int) else None


def _call(url: Url, method: str, **arguments: Any) -> Any:
    """The result of a method of the URL's file system."""
    from fsspec.asyn import sync

    filesystem = _filesystem(url.scheme, os.getpid())
    if filesystem.async_impl:
        function = getattr(filesystem, f"_{method}")
        return sync(filesystem.loop, function, url.text, timeout=REQUEST_S, **arguments)
    return getattr(filesystem, method)(url.text, **arguments)


@cache
def _filesystem(scheme: str, process: int) -> Any:
    """Per process: connections and their thread do not survive a fork."""
    import fsspec

    options: dict[str, Any] = dict(fsspec.config.conf.get(scheme, {}))
    if scheme in ("http", "https"):
        # Ranges of a compressed transfer would count other bytes. Proxies and ~/.netrc are used,
        # as by other programs.
        client = {"trust_env": True} | options.get("client_kwargs", {})
        options["client_kwargs"] = client | {"auto_decompress": False}
        options["headers"] = {"Accept-Encoding": "identity"} | options.get("headers", {})
    try:
        kind: Any = fsspec.get_filesystem_class(scheme)
        if scheme == "gs":  # its default class reads some buckets by gRPC
            from gcsfs.core import GCSFileSystem

            kind = GCSFileSystem
        filesystem = kind(**options, skip_instance_cache=True)
    except ImportError:
        package = SCHEMES[scheme]
        raise UserError(
            f"{scheme}:// needs the package {package}", next_step=f"pip install {package}"
        ) from None
    if scheme in ("http", "https"):
        from fsspec.asyn import sync

        sync(filesystem.loop, filesystem.set_session)  # must not run in two threads at once
    return filesystem
