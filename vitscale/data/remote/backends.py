"""Send single requests of every scheme through fsspec.

Owns: the file systems of a process. The only module that calls fsspec. Of the answers over HTTP, S3
and Google Cloud Storage it keeps at most one byte more than it asked for (`answers`).
Leaves out: retries (`store`).
"""

from __future__ import annotations

import os
from functools import cache, partial
from typing import Any

from vitscale.config.errors import UserError
from vitscale.data.remote.errors import NoRangesError
from vitscale.data.remote.urls import SCHEMES, Url


def connect(url: Url) -> None:
    """Open this process's connection. Raises UserError if a package is missing."""
    _filesystem(url.scheme, os.getpid())


def read_range(url: Url, *, offset: int, num_bytes: int, timeout_s: float) -> bytes:
    """Bytes of one range. Raises OSError for fewer, NoRangesError for more, EncodedError."""
    span = {"start": offset, "end": offset + num_bytes}
    data = call(url, "cat_file", timeout_s=timeout_s, **span) if num_bytes else b""
    if len(data) > num_bytes:
        raise NoRangesError(f"answers a request for {num_bytes} bytes with more: no range requests")
    if len(data) < num_bytes:
        raise OSError(f"ends after {offset + len(data)} bytes")
    return bytes(data)


def call(url: Url, method: str, *, timeout_s: float, **arguments: Any) -> Any:
    """The result of a method of the URL's file system."""
    from fsspec.asyn import sync

    filesystem = _filesystem(url.scheme, os.getpid())
    if filesystem.async_impl:
        function = getattr(filesystem, f"_{method}")
        return sync(filesystem.loop, function, url.text, timeout=timeout_s, **arguments)
    return getattr(filesystem, method)(url.text, **arguments)


@cache
def _filesystem(scheme: str, process: int) -> Any:
    """Per process: connections and their thread do not survive a fork."""
    import fsspec

    package = SCHEMES[scheme]
    options: dict[str, Any] = dict(fsspec.config.conf.get(scheme, {}))
    try:
        options |= _bounded(scheme, options)
        made = _google if scheme == "gs" else partial(fsspec.filesystem, scheme)
        filesystem = made(**options, skip_instance_cache=True)
    except ImportError:
        raise UserError(
            f"{scheme}:// needs the package {package}", next_step=f"pip install {package}"
        ) from None
    if scheme == "s3":
        filesystem.retries = 1
    if scheme in ("http", "https"):
        from fsspec.asyn import sync

        sync(filesystem.loop, filesystem.set_session)  # must not run in two threads at once
    return filesystem


def _google(**options: Any) -> Any:
    """The class that reads over HTTP; the default one reads some buckets by gRPC, unbounded."""
    from gcsfs.core import GCSFileSystem

    return GCSFileSystem(**options)


def _bounded(scheme: str, options: dict[str, Any]) -> dict[str, Any]:
    """Options that bound every answer; those of the user are kept."""
    if scheme == "memory":
        return {}
    if scheme == "s3":
        from vitscale.data.remote.answers import bounded_s3_session

        # Retries are the store's: others would hide errors behind its timeout.
        config = {"retries": {"total_max_attempts": 1}} | options.get("config_kwargs", {})
        return {"config_kwargs": config | {"http_session_cls": bounded_s3_session()}}
    from vitscale.data.remote.answers import BoundedResponse

    # Ranges of a compressed transfer would count other bytes.
    own = {"response_class": BoundedResponse, "auto_decompress": False}
    identity = {"Accept-Encoding": "identity"}
    if scheme == "gs":
        session = options.get("session_kwargs", {})
        return {
            "session_kwargs": session | own | {"headers": session.get("headers", {}) | identity}
        }
    # Use proxies and ~/.netrc, as other programs do.
    client = {"trust_env": True} | options.get("client_kwargs", {}) | own
    return {"client_kwargs": client, "headers": identity | options.get("headers", {})}
