"""Settings of the `checkpoint` group. Needs no torch."""

from __future__ import annotations

from pydantic import Field

from vitscale.config.section import Section


class CheckpointSettings(Section):
    """When checkpoints are written, how many stay, whether a run resumes."""

    every_steps: int = Field(default=1000, gt=0)
    """Steps between checkpoints; the last step always gets one."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints that stay; older ones are removed after a commit."""
    resume: str = "auto"
    """auto: resume from the newest valid checkpoint of this run folder; start when there is none
    (not when there are some and none can be read).
    never: refuse to start in a folder that has one."""
