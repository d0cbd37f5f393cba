"""Start the server of loader workers before this process has a thread. Needs no torch."""

from __future__ import annotations

import importlib

from vitscale.distributed.fork_server import start_server

# With these torch, the decoders and all readers of samples.
IMPORTS = ("vitscale.data.workers.process", "vitscale.data.samples")


def start_loader_server(num_workers: int) -> None:
    """Import what workers need, and start their server, which shares it, if there will be any."""
    if not num_workers:
        return
    for name in IMPORTS:
        importlib.import_module(name)
    start_server(IMPORTS)
