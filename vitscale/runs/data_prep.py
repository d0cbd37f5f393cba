"""Define the settings of data preparation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from vitscale.config.section import Problems, Run, Section
from vitscale.data.remote import location_of
from vitscale.runs.launching import LaunchSettings, launch_problems

# Module and class in data_prep/sources/, which only data_prep imports.
SOURCES = {
    "image_folder": "image_folder:ImageFolder",
    "class_tars": "tars:ClassTars",
    "webdataset": "tars:WebDataset",
    "parquet": "tables:ParquetImages",
    "path_table": "tables:PathTable",
}
# A tar header has 100 bytes for SPLIT-KEY.webp, of which SPLIT and KEY may take 94.
MAX_SPLIT_LENGTH = 24
SPLIT_NAMES = (
    f"1 to {MAX_SPLIT_LENGTH} letters, digits and _, without the substring 'tar', because tars and "
    "their members are named after the split"
)


def can_name_split(name: str) -> bool:
    """Whether a split may have this name; SPLIT_NAMES describes the rule."""
    # timm reads a split name that contains "tar" as a list of tar files.
    has_allowed_chars = re.fullmatch(r"[A-Za-z0-9_]+", name) is not None
    return has_allowed_chars and len(name) <= MAX_SPLIT_LENGTH and "tar" not in name


class SourceSettings(Section):
    """The raw corpus and its splits."""

    kind: Literal[tuple(SOURCES)] = "image_folder"  # type: ignore[valid-type]
    """Layout of the corpus; see `path`."""
    path: str
    """image_folder: folder with one sub-folder per class. class_tars: folder of tars, or one tar of
    tars, one inner tar per class, as ImageNet-21k comes. webdataset: folder of tars with images and
    labels; to be indexed, also its URL. parquet: folder or file with image bytes and labels
    (Hugging Face layout). path_table: CSV or Parquet file with paths and labels; paths are relative
    to the file's folder."""
    splits: dict[str, str] = {}
    """Split name -> sub-folder (or tar, or file name pattern) below `path`, such as {train: train,
    val: val}; empty: one split, `train`, or in an image_folder sub-folders named like splits."""
    val_labels: str | None = None
    """image_folder: list of the classes of a split's loose images, such as those of ILSVRC's val:
    lines of NAME,CLASS, or the classes alone in the order of the names."""
    image_column: str = "image"
    """parquet: column with bytes, or with {bytes, path}; path_table: column with paths."""
    label: str = "label"
    """parquet, path_table: column; webdataset: `cls`, or a field of `.json` as `json:FIELD`."""
    holdout_split: str = "test"
    """Split that held-out images go to."""
    holdout_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Share of each class moved from `train` to `holdout_split` (seeded). Only if the corpus has no
    other split."""
    val_per_class: NonNegativeInt = 0
    """Images of each class moved from `train` to `holdout_split`, never the whole class."""
    min_images_per_class: NonNegativeInt = 0
    """Smaller classes leave the corpus."""
    leave_out: str | None = None
    """duplicates.parquet of `vitscale prepare duplicates` over shards of this source: the images
    that it does not keep leave the corpus."""

    @property
    def place(self) -> str:
        """`path` as an absolute path without links, or the URL: equal for the same place."""
        place = location_of(self.path, where="source.path")
        if isinstance(place, Path):
            place = place.expanduser().resolve()
        return str(place)

    def other_place(self, made_from: str) -> str | None:
        """Describe the difference to the source that a manifest names; None: it is the same."""
        if made_from in ("", self.place):
            return None
        return f"made from {made_from}; source.path is {self.place}"


class LabelSettings(Section):
    """How classes become label numbers."""

    space: str | None = None
    """Name of a label space (imagenet_1k, imagenet_12k, imagenet_21k_goog, imagenet_22k,
    imagenet_21k_p, imagenet_21k_p_winter21) or a file with one class name per line; a label is
    the position in it. null: the sorted class names of the source."""
    values: Literal["name", "index", "none"] = "name"
    """What a class in the source (or the map) is: a name, such as a folder or a WordNet id, or the
    position in `space`. none: classes are ignored, and the shards have no labels."""
    map: str | None = None
    """CSV or TSV file with two columns: source class -> class."""
    unknown: Literal["refuse", "reject"] = "refuse"
    """Classes that are not in `space` or `map`: refuse = an error; reject = rows in the ledger."""


class ShardSettings(Section):
    """Size and number of the tars."""

    shard_mib: PositiveFloat = 256.0
    """Target size of a tar. Samples are spread evenly over the resulting number of tars."""
    min_shards: PositiveInt = 1
    """At least this many tars per split, for small corpora on many ranks."""


class ImageSettings(Section):
    """Which images are kept. CMYK, 16-bit, transparent, animated and EXIF-rotated ones become 8-bit
    RGB or grey (docs/images.md); all others keep their bytes."""

    check: Literal["header", "decode", "strict"] = "decode"
    """header: check the header and the end of each image; decode: decode it fully; strict: also
    reject JPEG files whose decoder warns."""
    max_pixels: PositiveInt = 100_000_000
    """Larger images are rejected by their header, before decoding."""
    min_side: PositiveInt = 1
    """Images with a shorter side are rejected."""
    short_side: PositiveInt | None = None
    """Re-encode images with a longer short side, to this length in pixels."""
    max_bad_fraction: float = Field(default=0.01, ge=0, le=1)
    """A larger share of bad images stops the run with an error. Hidden files and files without an
    image name are in the ledger but do not count."""


class DataPrepRun(Run):
    """raw corpus -> shards + index + ledger."""

    stage: Literal["data_prep"] = "data_prep"
    """`vitscale prepare` runs files of this stage."""
    output: str
    """Folder to create."""
    seed: NonNegativeInt = 0
    """Seed of the samples' order and of what is held out."""
    num_workers: PositiveInt | None = None
    """Processes in each task; null: one per core."""
    script: Literal["make_shards", "index_shards"] = "make_shards"
    """What launch/ starts of data_prep/: make_shards writes shards, index_shards leaves the tars of
    a webdataset where they are."""
    source: SourceSettings
    labels: LabelSettings = LabelSettings()
    images: ImageSettings = ImageSettings()
    shards: ShardSettings = ShardSettings()
    launch: LaunchSettings = LaunchSettings()

    def problems(self) -> Problems:
        if self.script == "index_shards" and self.source.kind != "webdataset":
            yield "source.kind", "must be webdataset for script=index_shards"
        if self.source.val_labels and self.source.kind != "image_folder":
            yield "source.val_labels", "is for source.kind=image_folder"
        if self.source.val_per_class and self.source.holdout_fraction:
            what = "and source.holdout_fraction are mutually exclusive; remove one of the two"
            yield "source.val_per_class", what

        # The held-out images come from `train`, so they need another name.
        holds_out = self.source.holdout_fraction or self.source.val_per_class
        if holds_out and self.source.holdout_split == "train":
            yield (
                "source.holdout_split",
                "must not be train, from which the images are taken",
            )

        if self.labels.values == "index" and self.labels.space is None:
            yield "labels.values", "index requires labels.space, the list of classes"
        if self.labels.values == "none":
            for key, value in {
                "labels.space": self.labels.space,
                "labels.map": self.labels.map,
                "source.val_per_class": self.source.val_per_class,
                "source.min_images_per_class": self.source.min_images_per_class,
            }.items():
                if value:
                    what = "needs classes, which labels.values=none ignores"
                    yield key, f"{what}; remove one of the two"

        names = {f"source.splits.{name}": name for name in self.source.splits}
        for key, name in {
            "source.holdout_split": self.source.holdout_split,
            **names,
        }.items():
            if not can_name_split(name):
                yield key, f"{name!r} cannot name a split; allowed: {SPLIT_NAMES}"
        yield from launch_problems(self.launch, independent_tasks=True)
