"""Settings of the `checkpoint` group. Needs no torch."""

from __future__ import annotations

from pydantic import Field

from vitscale.config.section import Section


class CheckpointSettings(Section):
    """When checkpoints are written, and how many stay."""

    every_steps: int = Field(default=1000, gt=0)
    """Steps between checkpoints; the last step always gets one."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints that stay; older ones are removed after a commit."""
