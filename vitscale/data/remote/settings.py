"""Settings of `data.remote`: how shards at a URL are read."""

from __future__ import annotations

from pydantic import Field

from vitscale.config.section import Section


class RemoteSettings(Section):
    """How shards behind a URL are read."""

    cache_path: str | None = None
    """Folder on a local disk that keeps whole shards, for all ranks, workers and jobs; null: none,
    every sample is read by range."""
    cache_gib: float = Field(default=100.0, gt=0)
    """The cache never holds more; what was used longest ago leaves first."""
    patience_s: float = Field(default=20.0, gt=0)
    """How long one read may take, all repetitions together, before the run ends."""
