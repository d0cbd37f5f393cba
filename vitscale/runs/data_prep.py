"""The run type of data preparation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from vitscale.config.section import Run, Section
from vitscale.runs.launching import LaunchSettings


class SourceSettings(Section):
    kind: Literal["image_folder"] = "image_folder"
    path: str
    """Folder with one sub-folder per class, or (with `splits`) one such folder per split."""
    splits: dict[str, str] = {}
    """Split name -> sub-folder, for example {train: train, test: test}; empty: one split, `train`."""
    holdout_split: str = "test"
    holdout_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Share of each class moved from `train` to `holdout_split` (seeded); only without `splits`."""


class ShardSettings(Section):
    shard_mib: float = Field(default=256.0, gt=0)
    """Size at which a tar is closed and the next one opened."""
    min_shards: int = Field(default=1, gt=0)
    """At least this many tars per split, for small corpora on many ranks."""


class ImageSettings(Section):
    max_pixels: int = Field(default=100_000_000, gt=0)
    """Larger images are rejected from their header, before any pixel is decoded."""
    max_bad_fraction: float = Field(default=0.01, ge=0, le=1)
    """More rejected inputs than this share stop the run with an error."""


class DataPrepRun(Run):
    """raw corpus -> shards + index + ledger."""

    stage: Literal["data_prep"] = "data_prep"
    output: str
    """Folder to create."""
    seed: int = Field(default=0, ge=0)
    source: SourceSettings
    shards: ShardSettings = ShardSettings()
    images: ImageSettings = ImageSettings()
    launch: LaunchSettings = LaunchSettings()

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.source.splits and self.source.holdout_fraction:
            yield (
                "source.holdout_fraction",
                "has no effect next to source.splits; remove one of the two",
            )
