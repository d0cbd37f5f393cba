"""Validate URLs of shard folders, join file names to them, and read files there.

The only module that calls fsspec, which supports schemes that run commands, and chains of schemes
(`pipe:`, `a::b`). Both are refused here: a scheme must be in `SCHEMES`, and fsspec gets plain URLs
only.
Leaves out: local copies (`cache`).
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
# A server serves no ranges if it sends more than asked this often; some do so once under load.
RANGE_TRIES = 3
# Scheme -> optional package that it needs.
SCHEMES: dict[str, str | None] = {
    "http": None,
    "https": None,
    "s3": "s3fs",
    "gs": "gcsfs",
    "memory": None,
}

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_PLAIN = re.compile(r"[A-Za-z0-9._~%+=,@!:/ -]*")


def is_url(text: str) -> bool:
    """Whether a text starts like a URL, with a scheme and a colon."""
    return _SCHEME.match(text) is not None


def url_problem(text: str) -> str | None:
    """Why a URL of a folder is refused. Never quotes the URL: it may contain a password."""
    scheme, _, rest = text.partition(":")
    if scheme not in (*SCHEMES, "file"):
        return (
            f"scheme {scheme + ':'!r} is not supported; allowed: {', '.join(SCHEMES)}, file, and "
            "paths (write ./ before a path with a colon)"
        )
    if not rest.startswith("//"):
        return f"a URL starts with {scheme}://"
    if "::" in rest:
        return "is a chain of URLs (::); give one URL"
    authority, _, path = rest[2:].partition("/")
    if "@" in authority or "?" in rest or "#" in rest:
        return (
            "a URL with a user name, password, '?' or '#' would put secrets into logs; give "
            "credentials where fsspec looks for them (environment, ~/.netrc, ~/.aws)"
        )
    if not authority and scheme not in ("file", "memory"):
        return f"has no host or bucket after {scheme}://"
    if not _PLAIN.fullmatch(rest) or ".." in path.split("/"):
        return (
            "has characters that a plain URL cannot have (line breaks, braces, wildcards, quotes, "
            "'..'); nothing is expanded"
        )
    return None


@dataclass(frozen=True, slots=True)
class Url:
    """A folder or file at a URL with a scheme of `SCHEMES`; `/` joins names as with paths."""

    text: str

    @classmethod
    def checked(cls, text: str, *, where: str) -> Url:
        """Raises UserError if `url_problem` finds one."""
        problem = url_problem(text)
        if problem is not None:
            raise UserError(problem, where=where)
        return cls(text.rstrip("/"))

    @property
    def scheme(self) -> str:
        return self.text.partition(":")[0]

    def __str__(self) -> str:
        return self.text

    def __truediv__(self, name: str) -> Url:
        """Join a relative name, which may contain `..` but must stay on the host or in the bucket.

        Names come from a manifest, so anything else raises UserError.
        """
        scheme, _, rest = self.text.partition("://")
        authority, _, folder = rest.partition("/")
        joined = normpath(f"{folder}/{name}" if folder else name)
        if name.startswith("/") or joined.split("/")[0] == ".." or re.search(r"[\0-\x1f]", name):
            raise UserError(f"{name!r} is not a valid file name below a URL", where=self.text)
        if scheme in ("http", "https"):
            own = normpath(folder) if folder else "."
            joined = normpath(f"{own}/{quote(name)}")
        return Url(f"{scheme}://{authority}/{'' if joined == '.' else joined}".rstrip("/"))


# A folder or file, on a file system or at a URL.
Location = Path | Url


def location_of(place: Location | str, *, where: str = "data.path") -> Location:
    """Parse a path or URL. Raises UserError for a URL that is not allowed."""
    if not isinstance(place, str):
        return place
    if not is_url(place):
        return Path(place)
    url = Url.checked(place, where=where)
    return Path(place.removeprefix("file://")) if url.scheme == "file" else url


T = TypeVar("T")


def read_range(url: Url, *, offset: int, num_bytes: int) -> bytes:
    """Bytes of one range. Raises StorageError; UserError if the server serves no ranges."""
    num_more = 0

    def attempt() -> bytes:
        nonlocal num_more
        span = {"start": offset, "end": offset + num_bytes}
        data = bytes(_call(url, "cat_file", **span)) if num_bytes else b""
        if len(data) > num_bytes:
            num_more += 1
            if num_more == RANGE_TRIES:
                raise UserError(
                    f"answers a request for {num_bytes} bytes with more: no range requests",
                    where=str(url),
                    next_step="use a server that supports range requests (nginx, S3, ...)",
                )
        if len(data) != num_bytes:
            raise OSError(f"sends {len(data)} instead of {num_bytes} bytes from {offset} on")
        return data

    return _retried(attempt, url)


def size_of(url: Url) -> int | None:
    """Size of a file in bytes; None: no such file. Raises StorageError."""

    def attempt() -> int | None:
        try:
            found = _call(url, "info")["size"]
        except FileNotFoundError as error:
            # fsspec raises it for any HTTP failure; the cause has the status.
            if error.__cause__ is not None and _status(error.__cause__) not in (404, 410):
                raise error.__cause__ from None
            return None
        if found is None:
            raise OSError("the server does not send the size of the file")
        return int(found)

    return _retried(attempt, url)


def names_below(folder: Url) -> list[str]:
    """Names of the files directly below a URL. Raises StorageError."""

    def attempt() -> list[str]:
        found = _call(folder, "ls", detail=True)
        return [each["name"].rpartition("/")[2] for each in found if each["type"] == "file"]

    return _retried(attempt, folder)


def _retried(attempt: Callable[[], T], url: Url) -> T:
    """Raises StorageError after `PATIENCE_S`; at once where the file is refused or missing.

    UserErrors pass.
    """
    pause_s, tries = FIRST_PAUSE_S, 0
    _filesystem(url.scheme, os.getpid())  # not counted: the first call imports a lot
    start, text = time.monotonic(), "no answer"
    while True:
        tries += 1
        try:
            return attempt()
        except UserError:
            raise
        except Exception as error:  # every backend has its own kinds
            # A timeout has no text: keep the last error that has one.
            if str(error):
                text = redact_queries(f"{type(error).__name__}: {error}")
            spent_s = time.monotonic() - start
            if _is_final(error) or spent_s + pause_s > PATIENCE_S:
                raise StorageError(
                    f"cannot be read ({text}); {tries} requests in {spent_s:.0f} s",
                    where=str(url),
                    next_step="check address, network and credentials, then run the same command "
                    "again",
                ) from None
        # System randomness: workers are forks of one server and would pause equally long.
        time.sleep(pause_s * SystemRandom().uniform(0.5, 1.5))
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _is_final(error: BaseException) -> bool:
    """Whether the file is refused or missing."""
    if isinstance(error, FileNotFoundError):
        return error.__cause__ is None or _status(error.__cause__) in (404, 410)
    return isinstance(error, PermissionError) or _status(error) in (401, 403)


def _status(error: BaseException) -> object:
    """The HTTP status of an error, if it has one."""
    return getattr(error, "status", None)


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
