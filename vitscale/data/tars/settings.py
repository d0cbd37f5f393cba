"""Settings of `data.webdataset`: tars that nobody indexed."""

from __future__ import annotations

from pydantic import Field

from vitscale.config.section import Section


class WebdatasetSettings(Section):
    """Tars that nobody indexed, for `reader: webdataset`."""

    num_samples: int | None = Field(default=None, gt=0)
    """Training samples in the tars: the length of an epoch. Required."""
    num_classes: int | None = Field(default=None, gt=0)
    """Labels are numbers below it, in members `.cls`; null: no labels."""
