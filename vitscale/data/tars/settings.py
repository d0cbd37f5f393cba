"""Settings of `data.webdataset`: tars that nobody indexed."""

from __future__ import annotations

from pydantic import Field

from vitscale.config.section import Section


class WebdatasetSettings(Section):
    """Tars that nobody indexed, for `reader: webdataset`."""

    num_samples: int | None = Field(default=None, gt=0)
    """Training samples in the tars: the length of an epoch. Required."""
    label: str = "cls"
    """Member with the label: `cls`, or a field of `.json` as `json:FIELD`."""
    num_classes: int | None = Field(default=None, gt=0)
    """Labels are numbers below it; null: `class_names`, or no labels."""
    class_names: str | None = None
    """Text file with one class name per line; labels are names, or line numbers from 0."""
    shuffle: int = Field(default=1000, ge=0)
    """Samples in the shuffle buffer of each loader process, as stored: about 0.1 MiB each for
    photographs."""
