"""The run type of data preparation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from vitscale.config.section import Run, Section
from vitscale.runs.launching import LaunchSettings, launch_problems


class SourceSettings(Section):
    kind: Literal["image_folder"] = "image_folder"
    path: str
    """Folder with one sub-folder per class, or (with `splits`) one such folder per split."""
    splits: dict[str, str] = {}
    """Split name -> sub-folder, such as {train: train, test: test}; empty: one split, `train`."""
    holdout_split: str = "test"
    holdout_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Share of each class moved from `train` to `holdout_split` (seeded); only without `splits`."""


class ShardSettings(Section):
    shard_mib: float = Field(default=256.0, gt=0)
    """Size aimed at; samples are spread evenly over as many tars as that makes."""
    min_shards: int = Field(default=1, gt=0)
    """At least this many tars per split, for small corpora on many ranks."""


class ImageSettings(Section):
    max_pixels: int = Field(default=100_000_000, gt=0)
    """Larger images are rejected from their header, before any pixel is decoded."""
    max_bad_fraction: float = Field(default=0.01, ge=0, le=1)
    """A larger share of broken images stops the run with an error. Hidden files and files not
    named like images are in the ledger but do not count."""


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
        if self.source.holdout_fraction and self.source.holdout_split == "train":
            yield ("source.holdout_split", "must differ from train, which it is taken from")
        for key, name in [
            ("source.holdout_split", self.source.holdout_split),
            *((f"source.splits.{name}", name) for name in self.source.splits),
        ]:
            # timm takes a split name that holds "tar" for a list of tar files.
            if not re.fullmatch(r"[A-Za-z0-9_]+", name) or "tar" in name:
                yield (
                    key,
                    f"{name!r} names tar files: use letters, digits and _, without the "
                    "letters 'tar' in a row",
                )
        yield from launch_problems(self.launch)
