"""Validate URLs of shard folders, join file names to them, and read files there.

The only module that calls fsspec, which supports schemes that run commands, and chains of schemes
(`pipe:`, `a::b`). Both are refused here: fsspec gets plain URLs with a scheme of `SCHEMES` only.
Leaves out: local copies (`shards`).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
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
CHUNK_BYTES = 8 << 20
# Scheme -> optional package that it needs.
SCHEMES: dict[str, str | None] = {
    "http": None,
    "https": None,
    "s3": "s3fs",
    "gs": "gcsfs",
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


class MissingError(UserError):
    """There is no such file, which no retry changes."""


def read_range(url: Url, *, offset: int, num_bytes: int) -> bytes:
    """Bytes of one range. Raises StorageError or MissingError, as all that read here."""

    def whole(data: bytes) -> bytes:
        if len(data) != num_bytes:
            raise OSError(
                f"sends {len(data)} instead of {num_bytes} bytes from {offset} on; a server must "
                "support range requests"
            )
        return bytes(data)

    return _ask(url, "cat_file", whole, start=offset, end=offset + num_bytes) if num_bytes else b""


def read_chunks(url: Url, num_bytes: int) -> Iterator[bytes]:
    """The first bytes of a file, in parts that are each tried again."""
    for offset in range(0, num_bytes, CHUNK_BYTES):
        yield read_range(url, offset=offset, num_bytes=min(CHUNK_BYTES, num_bytes - offset))


def size_of(url: Url) -> int:
    """Size of a file in bytes."""

    def known(info: dict[str, Any]) -> int:
        if info["size"] is None:
            raise OSError("the server does not send the size of the file")
        return int(info["size"])

    return _ask(url, "info", known)


def names_below(folder: Url) -> list[str]:
    """Names of the files directly below a URL."""
    found = _ask(folder, "ls", list, detail=True)
    return [each["name"].rpartition("/")[2] for each in found if each["type"] == "file"]


def _ask(url: Url, method: str, use: Callable[[Any], T], **arguments: Any) -> T:
    """What `use` makes of the answer of the URL's file system; both are tried again.

    Raises StorageError after `PATIENCE_S`, or at once if refused; MissingError for no such file.
    """
    pause_s, tries = FIRST_PAUSE_S, 0
    filesystem = _filesystem(url.scheme, os.getpid())  # not counted: the first imports a lot
    start, text = time.monotonic(), "no answer"
    while True:
        tries += 1
        try:
            # timeout: of fsspec's event loop
            return use(getattr(filesystem, method)(url.text, timeout=REQUEST_S, **arguments))
        except Exception as error:  # every backend has its own kinds
            cause: BaseException = error
            if isinstance(error, FileNotFoundError):  # fsspec's for any HTTP failure
                cause = error.__cause__ or error
            status = getattr(cause, "status", None)
            # A timeout has no text: keep the last error that has one.
            if str(cause):
                text = redact_queries(f"{type(cause).__name__}: {cause}")
            spent_s = time.monotonic() - start
            is_missing = isinstance(error, FileNotFoundError) and status in (None, 404, 410)
            is_refused = isinstance(error, PermissionError) or status in (401, 403)
            if is_missing or is_refused or spent_s + pause_s > PATIENCE_S:
                raise (MissingError if is_missing else StorageError)(
                    f"cannot be read ({text}); {tries} requests in {spent_s:.0f} s",
                    where=str(url),
                    next_step="check address, network and credentials, then run the same command "
                    "again",
                ) from None
        # System randomness: workers are forks of one server and would pause equally long.
        time.sleep(pause_s * SystemRandom().uniform(0.5, 1.5))
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


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
