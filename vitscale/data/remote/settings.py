"""Settings of `data.remote`: how shards at a URL are read."""

from __future__ import annotations

from pydantic import Field

from vitscale.config.section import Section


class RemoteSettings(Section):
    """How shards at a URL are read."""

    cache_path: str | None = None
    """Folder on a local disk that caches whole shards for all ranks, workers and jobs; null: no
    cache, every sample is one range request."""
    cache_gib: float = Field(default=100.0, gt=0)
    """Maximum size of the cache; the least recently used shard is evicted first."""
    patience_s: float = Field(default=20.0, gt=0)
    """Time limit of one read, retries included, after which the run ends."""
