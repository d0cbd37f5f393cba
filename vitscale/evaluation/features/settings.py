"""Settings of the features that evaluations share. Needs no torch."""

from __future__ import annotations

from pydantic import Field

from vitscale.config.section import Section


class FeatureSettings(Section):
    """Where extracted features are kept."""

    cache: str | None = None
    """Folder, shared by all nodes, that keeps them for the next command and for a restart after a
    kill; null: memory only. Remove it when it is no longer needed."""
    images_per_file: int = Field(default=1024, gt=0)
    """Images whose features are written at once: what a kill can cost."""
