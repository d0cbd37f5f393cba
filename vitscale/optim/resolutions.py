"""A sequence of image sizes inside one run: the list `schedule.resolutions`. Needs no torch.

Owns: its settings, and the steps at which each image size begins.
Leaves out: whether a list fits the model (`runs.training`), and the change from one image size to
the next (`training.loop`).
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from vitscale.config.errors import UserError
from vitscale.config.section import Section

KEY = "schedule.resolutions"


class ResolutionSettings(Section):
    """One image size of a run that trains at several, in the order of training; null: one size.

    Each is larger than the one before, and the last is `model.image_size`.
    """

    image_size: int = Field(gt=0)
    """Pixels a side."""
    until: float | None = Field(default=None, gt=0, lt=1)
    """Share of all steps after which the next image size begins; null for the last."""
    max_micro_batch: int | None = Field(default=None, gt=0)
    """Most images per rank and forward pass at this size; null: `engine.max_micro_batch`."""


def spans(resolutions: Sequence[ResolutionSettings], *, total_steps: int) -> list[tuple[int, int]]:
    """(first step, step after the last) of each image size.

    Raises UserError when one of them would have no step.
    """
    ends = [round((each.until or 1.0) * total_steps) for each in resolutions]
    found = list(zip([0, *ends[:-1]], ends, strict=True))
    for each, (start, stop) in zip(resolutions, found, strict=True):
        if start >= stop:
            raise UserError(
                f"no step of {total_steps} is left for {each.image_size} px "
                f"(from step {start} to step {stop})",
                where=KEY,
                next_step="move `until`, or lengthen the run",
            )
    return found
