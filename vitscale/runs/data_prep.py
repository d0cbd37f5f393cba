"""The run type of data preparation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from vitscale.config.section import Run, Section
from vitscale.runs.launching import LaunchSettings, launch_problems

# The keys of SOURCES in data_prep/sources/registry.py, which this layer cannot import. A test
# compares the two.
SourceKind = Literal["image_folder", "class_tars", "webdataset", "parquet", "path_table"]
ImageFormat = Literal["jpeg", "png", "webp"]
# A tar header has 100 bytes for SPLIT-KEY.webp, of which SPLIT and KEY may take 94.
MAX_SPLIT_LENGTH = 24
SPLIT_NAMES = (
    f"1 to {MAX_SPLIT_LENGTH} letters, digits and _, without the letters 'tar' in a row: tars and "
    "their members are named after it"
)


def can_name_split(name: str) -> bool:
    """Whether a split may have this name; SPLIT_NAMES says it in words."""
    # timm takes a split name that holds "tar" for a list of tar files.
    return re.fullmatch(r"[A-Za-z0-9_]+", name) is not None and (
        len(name) <= MAX_SPLIT_LENGTH and "tar" not in name
    )


class SourceSettings(Section):
    """The raw corpus and its splits."""

    kind: SourceKind = "image_folder"
    """Layout of the corpus; see `path`."""
    path: str
    """image_folder: folder with one sub-folder per class. class_tars: folder of tars, or one tar of
    tars, one inner tar per class, as ImageNet-21k comes. webdataset: folder of tars with images and
    labels. parquet: folder or file with image bytes and labels (Hugging Face layout). path_table:
    CSV or Parquet file with paths and labels; paths are relative to the file's folder."""
    splits: dict[str, str] = {}
    """Split name -> sub-folder (or tar, or file name pattern) below `path`, such as {train: train,
    test: val}; empty: one split, `train`."""
    image_column: str = "image"
    """parquet: column with bytes, or with {bytes, path}; path_table: column with paths."""
    label: str = "label"
    """parquet, path_table: column; webdataset: `cls`, or a field of `.json` as `json:FIELD`."""
    holdout_split: str = "test"
    """Split that held-out images go to."""
    holdout_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Share of each class moved from `train` to `holdout_split` (seeded); only without `splits`."""
    val_per_class: int = Field(default=0, ge=0)
    """Images of each class moved from `train` to `holdout_split`; never a whole class."""


class LabelSettings(Section):
    """How classes become label numbers."""

    space: str | None = None
    """Name of a label space (imagenet_1k, imagenet_12k, imagenet_21k_goog, imagenet_22k,
    imagenet_21k_p) or a file with one class name per line; a label is the position in it. null:
    the sorted class names of the source."""
    values: Literal["name", "index"] = "name"
    """What the source (or the map) gives as class: a name such as a folder's or a WordNet id, or
    the position in `space`."""
    map: str | None = None
    """CSV or TSV file with two columns: what the source gives -> class."""
    map_key: Literal["class", "image"] = "class"
    """Whether the map's first column is the source's class or the image's name without suffix."""
    unknown: Literal["refuse", "reject"] = "refuse"
    """Classes that are not in `space` or `map`: an error, or rows in the ledger."""
    parents: str | None = None
    """CSV or TSV file with two columns, class -> super-class, kept in the manifest."""


class ShardSettings(Section):
    """Size and number of the tars."""

    shard_mib: float = Field(default=256.0, gt=0)
    """Size aimed at; samples are spread evenly over as many tars as that makes."""
    min_shards: int = Field(default=1, gt=0)
    """At least this many tars per split, for small corpora on many ranks."""


class ImageSettings(Section):
    """Which images are kept, and what is converted."""

    check: Literal["header", "decode", "strict"] = "decode"
    """How far an image is read to be believed: its header and its end, or everything in it; strict:
    a JPEG's decoder may not even warn."""
    formats: tuple[ImageFormat, ...] = Field(default=("jpeg", "png", "webp"), strict=False)
    """Encodings that are kept; others are rejected."""
    max_pixels: int = Field(default=100_000_000, gt=0)
    """Larger images are rejected from their header, before any pixel is decoded."""
    max_file_mib: float = Field(default=512.0, gt=0)
    """Larger files are rejected unread."""
    min_side: int = Field(default=1, gt=0)
    """Images with a shorter side are rejected."""
    convert: bool = True
    """CMYK, 16-bit, transparent, animated and EXIF-rotated images become plain 8-bit RGB or grey
    ones (docs/data_format.md); everything else keeps its bytes."""
    short_side: int | None = Field(default=None, gt=0)
    """Re-encode images whose short side is longer, to this length."""
    jpeg_quality: int = Field(default=95, ge=1, le=100)
    """Of whatever is encoded anew as JPEG."""
    max_bad_fraction: float = Field(default=0.01, ge=0, le=1)
    """A larger share of broken images stops the run with an error. Hidden files and files not
    named like images are in the ledger but do not count."""


class SelectionSettings(Section):
    """What leaves the corpus although it is sound. Any of these reads the source twice."""

    min_images_per_class: int = Field(default=0, ge=0)
    """Smaller classes leave the corpus."""
    duplicates: Literal["keep", "drop_exact", "drop_similar"] = "keep"
    """Within the corpus: of images with equal bytes (or that look the same) one stays."""
    evaluation_sets: tuple[str, ...] = Field(default=(), strict=False)
    """Image folders or shard folders; whatever looks like an image of theirs leaves the corpus."""


class DataPrepRun(Run):
    """raw corpus -> shards + index + ledger."""

    stage: Literal["data_prep"] = "data_prep"
    """Scripts refuse files of another stage."""
    output: str
    """Folder to create."""
    seed: int = Field(default=0, ge=0)
    """Seed of the samples' order and of what is held out."""
    num_workers: int | None = Field(default=None, gt=0)
    """Processes in each task; null: one per core."""
    source: SourceSettings
    labels: LabelSettings = LabelSettings()
    images: ImageSettings = ImageSettings()
    selection: SelectionSettings = SelectionSettings()
    shards: ShardSettings = ShardSettings()
    launch: LaunchSettings = LaunchSettings()

    @property
    def needs_survey(self) -> bool:
        """Whether every image has to be seen before the first one can be written."""
        s = self.selection
        return bool(
            s.min_images_per_class
            or s.duplicates != "keep"
            or s.evaluation_sets
            or self.source.val_per_class
        )

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.source.splits and self.source.holdout_fraction:
            yield (
                "source.holdout_fraction",
                "has no effect next to source.splits; remove one of the two",
            )
        if self.source.val_per_class and self.source.holdout_fraction:
            yield ("source.val_per_class", "and source.holdout_fraction exclude each other")
        holds_out = self.source.holdout_fraction or self.source.val_per_class
        if holds_out and self.source.holdout_split == "train":
            yield ("source.holdout_split", "must differ from train, which it is taken from")
        if self.labels.values == "index" and self.labels.space is None:
            yield ("labels.values", "index needs labels.space: positions in which list?")
        for key, name in [
            ("source.holdout_split", self.source.holdout_split),
            *((f"source.splits.{name}", name) for name in self.source.splits),
        ]:
            if not can_name_split(name):
                yield (key, f"{name!r} cannot name a split; allowed: {SPLIT_NAMES}")
        yield from launch_problems(self.launch, independent_tasks=True)
