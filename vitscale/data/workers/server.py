"""Start the server of loader workers before torch is imported. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence

from vitscale.data.remote.urls import is_url
from vitscale.distributed.fork_server import start_server

# With these torch, the decoders and all readers of samples.
IMPORTS = ("vitscale.data.workers.process", "vitscale.data.samples")
# Imported by the first use of a URL. s3 and gs import them and more.
REMOTE_IMPORTS = ("fsspec.implementations.http",)


def start_loader_server(num_workers: int, *, paths: Sequence[str], streamed: bool = False) -> None:
    """Let the server import what workers need while this process imports its own, if there will
    be any workers.

    paths: of the shards. streamed: with the webdataset library.
    """
    if num_workers:
        remote = REMOTE_IMPORTS if any(map(is_url, paths)) else ()
        start_server([*IMPORTS, *remote, *(("webdataset",) if streamed else ())])
