"""Start the server of loader workers before this process has a thread. Needs no torch."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from vitscale.data.remote.urls import is_url
from vitscale.distributed.fork_server import start_server

# With these torch, the decoders and all readers of samples.
IMPORTS = ("vitscale.data.workers.process", "vitscale.data.samples")
# Imported by the first use of a URL. s3 and gs import them and more.
REMOTE_IMPORTS = ("fsspec.implementations.http",)


def start_loader_server(num_workers: int, *, paths: Sequence[str]) -> None:
    """Import what workers need, and start their server, which shares it, if there will be any.

    paths: of the shards.
    """
    if not num_workers:
        return
    for name in IMPORTS:
        importlib.import_module(name)
    remote = REMOTE_IMPORTS if any(map(is_url, paths)) else ()
    start_server([*IMPORTS, *remote])
