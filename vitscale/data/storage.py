"""Validate URLs of shard folders, join file names to them, and read files there.

The only module that calls fsspec, which supports schemes that run commands, and chains of schemes
(`pipe:`, `a::b`). Both are refused here: fsspec gets plain URLs with a scheme of `SCHEMES` only.
Leaves out: local copies (`shards`).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from posixpath import normpath
from random import SystemRandom
from typing import Any, TypeVar
from urllib.parse import quote

from vitscale.config.errors import StorageError, UserError
from vitscale.config.redaction import redact_queries

# Time limit of one read, retries included, after which the run ends; of one request.
PATIENCE_S, REQUEST_S = 120.0, 30.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
# Scheme -> optional package that it needs.
SCHEMES: dict[str, str | None] = {
    "http": None,
    "https": None,
    "s3": "s3fs",
    "gs": "gcsfs",
    "memory": None,
}
_PLAIN = re.compile(
    rf"((?:{'|'.join(SCHEMES)})://[A-Za-z0-9._~:-]+|file://)(/[A-Za-z0-9._~%+=,@!:/ -]*)?"
)


def is_url(text: str) -> bool:
    """Whether a text starts like a URL, with a scheme and a colon."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", text) is not None


def url_problem(text: str) -> str | None:
    """Why a URL of a folder is refused. Never quotes the URL: it may contain a password."""
    if _PLAIN.fullmatch(text) and "::" not in text and ".." not in text.split("/"):
        return None
    return (
        f"is not a plain URL of {', '.join(SCHEMES)} or file: one without a user name, password, "
        "'?', '#', '::', '..', quotes or wildcards (credentials belong where fsspec looks for "
        "them: environment, ~/.netrc, ~/.aws); write ./ before a path with a colon"
    )


@dataclass(frozen=True, slots=True)
class Url:
    """A folder or file at a URL with a scheme of `SCHEMES`; `/` joins names as with paths."""

    text: str

    @property
    def scheme(self) -> str:
        return self.text.partition(":")[0]

    def __str__(self) -> str:
        return self.text

    def __truediv__(self, name: str) -> Url:
        """Join a relative name. Whatever it contains, the result is on this host or bucket."""
        scheme, _, rest = self.text.partition("://")
        authority, _, folder = rest.partition("/")
        name = quote(name) if scheme in ("http", "https") else name
        path = normpath("/" + f"{folder}/{name}".lstrip("/"))
        return Url(f"{scheme}://{authority}{path}".rstrip("/"))


# A folder or file, on a file system or at a URL.
Location = Path | Url


def location_of(place: Location | str, *, where: str = "data.path") -> Location:
    """Parse a path or URL. Raises UserError for a URL that is not allowed."""
    if not isinstance(place, str):
        return place
    if not is_url(place):
        return Path(place)
    if problem := url_problem(place):
        raise UserError(problem, where=where)
    path = place.removeprefix("file://")
    return Path(path) if path != place else Url(place.rstrip("/"))


T = TypeVar("T")


def read_range(url: Url, *, offset: int, num_bytes: int) -> bytes:
    """Bytes of one range. Raises StorageError."""

    def attempt() -> bytes:
        data = bytes(_call(url, "cat_file", start=offset, end=offset + num_bytes))
        if len(data) != num_bytes:
            raise OSError(
                f"sends {len(data)} instead of {num_bytes} bytes from {offset} on; a server must "
                "support range requests"
            )
        return data

    return _retried(attempt, url) if num_bytes else b""


def size_of(url: Url) -> int | None:
    """Size of a file in bytes; None: no such file. Raises StorageError."""

    def attempt() -> int | None:
        try:
            found = _call(url, "info")["size"]
        except FileNotFoundError:
            return None
        if found is None:
            raise OSError("the server does not send the size of the file")
        return int(found)

    return _retried(attempt, url)


def names_below(folder: Url) -> list[str]:
    """Names of the files directly below a URL. Raises StorageError."""
    found = _retried(lambda: _call(folder, "ls", detail=True), folder)
    return [each["name"].rpartition("/")[2] for each in found if each["type"] == "file"]


def _retried(attempt: Callable[[], T], url: Url) -> T:
    """Raises StorageError after `PATIENCE_S`; at once where the file is refused or missing."""
    pause_s, tries = FIRST_PAUSE_S, 0
    _filesystem(url.scheme, os.getpid())  # not counted: the first call imports a lot
    start, text = time.monotonic(), "no answer"
    while True:
        tries += 1
        try:
            return attempt()
        except Exception as error:  # every backend has its own kinds
            # A timeout has no text: keep the last error that has one.
            if str(error):
                text = redact_queries(f"{type(error).__name__}: {error}")
            spent_s = time.monotonic() - start
            is_final = isinstance(error, FileNotFoundError | PermissionError)
            if is_final or _status(error) in (401, 403) or spent_s + pause_s > PATIENCE_S:
                raise StorageError(
                    f"cannot be read ({text}); {tries} requests in {spent_s:.0f} s",
                    where=str(url),
                    next_step="check address, network and credentials, then run the same command "
                    "again",
                ) from None
        # System randomness: workers are forks of one server and would pause equally long.
        time.sleep(pause_s * SystemRandom().uniform(0.5, 1.5))
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _status(error: BaseException) -> object:
    """The HTTP status of an error, if it has one."""
    return getattr(error, "status", None)


def _call(url: Url, method: str, **arguments: Any) -> Any:
    """The result of a method of the URL's file system."""
    if url.scheme != "memory":
        arguments["timeout"] = REQUEST_S  # of fsspec's event loop
    try:
        return getattr(_filesystem(url.scheme, os.getpid()), method)(url.text, **arguments)
    except FileNotFoundError as error:
        # fsspec raises it for any HTTP failure; the cause has the status.
        if (cause := error.__cause__) is not None and _status(cause) not in (404, 410):
            raise cause from None
        raise


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
