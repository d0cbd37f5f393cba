"""Start the server of loader workers before torch is imported. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vitscale.data.remote.urls import is_url
from vitscale.distributed.fork_server import start_server

if TYPE_CHECKING:
    from vitscale.data.settings import DataSettings

# With these torch, the decoders and all readers of samples.
IMPORTS = ("vitscale.data.workers.process", "vitscale.data.samples")
# Imported by the first use of a URL. s3 and gs import them and more.
REMOTE_IMPORTS = ("fsspec.implementations.http",)


def start_loader_server(num_workers: int, *, paths: Sequence[str]) -> None:
    """Let the server import what workers need while this process imports its own, if there will
    be any workers. paths: of the shards."""
    if num_workers:
        start_server([*IMPORTS, *(REMOTE_IMPORTS if any(map(is_url, paths)) else ())])


def start_training_server(data: DataSettings) -> None:
    """The same for the settings of a training."""
    if data.num_workers and data.reader == "webdataset":
        start_server([*IMPORTS, *REMOTE_IMPORTS, "webdataset"])
    else:
        paths = [data.path, *(part.path for part in data.mixture)]
        start_loader_server(data.num_workers, paths=paths)
