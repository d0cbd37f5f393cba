"""Settings of `data`: which samples, in which batches, and how images become tensors."""

from __future__ import annotations

import math
from functools import reduce
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from vitscale.config.errors import UserError
from vitscale.config.section import Items, Pair, Problems, Section, Triple
from vitscale.data.remote import Url, location_of
from vitscale.images.settings import AugmentSettings, Fraction

# These choose nothing of tars without an index; data_prep/index_shards.py makes one.
NEEDS_INDEX = """
first_percent only_classes only_keys mixture dev_percent repeats views planned_num_samples
""".split()


class MixingSettings(Section):
    """Mixup and CutMix of neighbouring positions; needs an even micro-batch."""

    mixup_alpha: PositiveFloat | None = None
    """Mixing weights come from Beta(alpha, alpha); null: no Mixup. AugReg 0.2 to 0.8, DeiT 0.8."""
    cutmix_alpha: PositiveFloat | None = None
    """Area shares come from Beta(alpha, alpha); null: no CutMix. With both, one of the two is drawn
    each time. DeiT 1."""
    mode: Literal["batch", "pair"] = "batch"
    """batch: one draw per global batch, as in AugReg. pair: one draw per two images."""


class WebdatasetSettings(Section):
    """Tars that nobody indexed, for `reader: webdataset`."""

    num_samples: PositiveInt | None = None
    """Training samples in the tars: the length of an epoch. Required."""
    num_classes: PositiveInt | None = None
    """Labels are numbers below it, in members `.cls`; null: no labels."""


class RemoteSettings(Section):
    """The local copies of shards at a URL."""

    cache_path: str | None = None
    """Folder on a local disk of each node, for whole shards, shared by all ranks, workers and jobs;
    required for a URL."""
    cache_gib: PositiveFloat = 100.0
    """Maximum size of the cache; the least recently used shard is evicted first."""


class MixedInShards(Section):
    """A further set of shards and its share of the samples."""

    path: str
    """Shard folder or its URL; training reads `train_split` of it, too."""
    share: float = Field(ge=0.001, le=0.999)
    """Share of all samples seen."""


class ViewSettings(Section):
    """Random crops of each image; a key that is null is that of `data`."""

    name: str
    """What the objective calls them."""
    count: int = Field(default=1, gt=0, le=16)
    """Crops of each image, drawn one by one."""
    image_size: int | None = Field(default=None, gt=0, le=4096)
    """Pixels a side; null: the model's."""
    crop_area: tuple[Fraction, Fraction] | None = Field(default=None, strict=False)
    """Range of the area share of the crop."""
    augment: AugmentSettings | None = None
    """Applied after crop and flip."""


class DataSettings(Section):
    """Which samples, in what batches, and how images become tensors."""

    path: str
    """Folder written by `vitscale prepare shards` or `index`, with index.parquet and manifest.json,
    or its URL: http, https, s3, gs."""
    train_split: str = "train"
    """Split that training reads."""
    first_percent: float = Field(default=100.0, gt=0, le=100)
    """Only this share of the samples, rounded up, a random subset: the first ones of shards, which
    are shuffled; of indexed tars, which may be sorted, ones drawn from all."""
    only_classes: Items[str] = ()
    """Train on and evaluate only samples of these classes; labels do not change. Empty: all."""
    only_keys: str | None = None
    """Text file with one key per line: only these samples, of those that `first_percent` and
    `only_classes` leave. The shards stay as they are. null: all keys."""
    reader: Literal["index", "webdataset"] = "index"
    """index: shards with an index, in an order that resumes exactly on any layout. webdataset:
    local tars that nobody indexed, streamed by the webdataset library, for training alone; a resume
    is not exact. `path` is their folder, `train_split` their names: `train` for `train-*.tar`, or
    `train-{000000..000146}.tar`."""
    webdataset: WebdatasetSettings = WebdatasetSettings()
    mixture: Items[MixedInShards] = ()
    """Further sets, with the same label map where labels are read; `path` provides the remaining
    samples. The settings above that choose samples are for `path`. Images that `dev_percent` holds
    out, in any copy, are refused; those of `val_split` are counted in a line."""
    repeats: int = Field(default=1, gt=0, le=16)
    """Repeated augmentation: how often each sample comes, augmented differently. DeiT: 3. All are
    in one global batch if `global_batch` is a multiple of 64 * repeats."""
    views: Items[ViewSettings] = Field(default=(), max_length=4)
    """Views of each image, from one decode, for objectives that compare them. Empty: the image
    once, by the keys below. At most 4, of at most 16 crops: so many are decoded in one pass."""
    val_split: str | None = "test"
    """Split evaluated during and after training; null: none."""
    dev_percent: float = Field(default=0.0, ge=0, lt=100)
    """Evaluate the last part of the training samples instead of `val_split`, and do not train on
    it: for choosing hyper-parameters. Of indexed tars, which may be sorted, a part drawn from all.
    A share of what `first_percent` and `only_classes` leave of `path`, rounded to whole samples; of
    a mixture, `path` alone is cut. ViT paper: 1 % of ImageNet, 2 % of CIFAR, 10 % of Pets and
    Flowers. 0: no cut."""
    global_batch: PositiveInt
    """Images per optimiser step over all ranks; determines micro-batch and accumulation."""
    planned_num_samples: PositiveInt | None = None
    """Training samples that `--dry-run` assumes while `path` does not exist yet."""
    num_workers: NonNegativeInt = 2
    """Loader processes per rank. The batches do not depend on it."""
    decoder: Literal["auto", "region", "whole"] = "auto"
    """auto: the first of the others that works on this machine."""
    remote: RemoteSettings = RemoteSettings()
    max_unreadable_fraction: float = Field(default=0.001, ge=0, le=1)
    """Unreadable training samples are replaced by others; the run ends if more than this share of
    the samples seen (or of one epoch) is unreadable."""
    crop: Literal["inception", "inception_tf", "plain", "squash"] = "inception"
    """inception: a box of random area and aspect, as torchvision draws them. inception_tf: of
    random height and aspect, as TensorFlow draws them for ViT and AugReg; smaller on average.
    plain: resize the short side to the image size, pad by 4 px of reflection, crop; DeiT-III on
    21k. squash: resize the whole image to the image size, crop `crop_share` of its sides; BiT."""
    crop_area: tuple[Fraction, Fraction] = Field(default=(0.05, 1.0), strict=False)
    """Range of the area share of the crop; 0.05 to 1 in the ViT paper's code."""
    crop_aspect: Pair = (3 / 4, 4 / 3)
    """Least and largest ratio of the random crop's sides."""
    crop_share: float = Field(default=1.0, gt=0, le=1)
    """squash only: side of the crop over that of the square; BiT 384 / 448 and 128 / 160."""
    horizontal_flip: bool = True
    """Mirror every second training image, at random."""
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    """Filter of every resize; `eval_interpolation` may set another one for evaluation."""
    antialias: bool = False
    """Smooth training images that are made smaller; false as in tf.image.resize (ViT, AugReg)."""
    augment: AugmentSettings = AugmentSettings()
    mixing: MixingSettings | None = None
    eval_resize: Literal[
        "squash", "center_crop", "squash_crop", "center_crop_down", "squash_crop_down"
    ] = "squash"
    """squash: resize the whole image to the image size (ViT paper's code). center_crop: resize
    until the image size is covered, then crop the centre. squash_crop: resize the whole image to a
    larger square, then crop its centre (some weights of timm). _down: where an odd number of pixels
    is cut, the centre begins where Hugging Face's processors begin it, half of the times 1 px up
    and left of timm's."""
    eval_interpolation: Literal["bilinear", "bicubic", "area"] | None = None
    """Filter of the evaluation's resize; null: `interpolation`. area: the mean of each pixel's
    area, as big_vision's `resize_small`; decodes whole images."""
    eval_antialias: bool = True
    """False as in tf.image.resize, for the ViT paper's code. Has no effect on area."""
    eval_crop_fraction: float = Field(default=0.875, gt=0, le=1)
    """Not of squash: image size / resized side; 224 / 256 = 0.875."""
    mean: Triple = (0.5, 0.5, 0.5)
    """Subtracted from red, green and blue, each in [0, 1], before the division by `std`."""
    std: Triple = (0.5, 0.5, 0.5)
    """0.5 / 0.5 maps pixels to [-1, 1], as in the ViT paper's code; DeiT uses ImageNet's values."""

    @property
    def all_views(self) -> tuple[ViewSettings, ...]:
        """Those of `views`, or the one that the image is without."""
        return self.views or (ViewSettings(name="images"),)

    def of_view(self, view: ViewSettings) -> DataSettings:
        """The settings by which crops of a view are made."""
        changes = {name: getattr(view, name) for name in ("crop_area", "augment")}
        given = {name: value for name, value in changes.items() if value is not None}
        return self.model_copy(update=given)

    def num_first(self, num_samples: int) -> int:
        """Samples of `first_percent`."""
        return math.ceil(num_samples * self.first_percent / 100)

    def num_dev(self, num_samples: int) -> int:
        """Samples of `dev_percent`. Raises UserError if either side of the cut has none."""
        num = round(num_samples * self.dev_percent / 100)
        if self.dev_percent == 0 or 0 < num < num_samples:
            return num
        share = f"{self.dev_percent:g} % of {num_samples:,} training samples"
        what = f"{share} is {num:,}, which leaves none to {'train on' if num else 'evaluate'}"
        allowed = None
        if num_samples > 1:
            allowed = f"a share of 1 to {num_samples - 1:,} samples"
        raise UserError(what, where="data.dev_percent", allowed=allowed)

    @property
    def is_streamed(self) -> bool:
        """Whether tars are read without an index."""
        return self.reader == "webdataset"

    @property
    def evaluated(self) -> str | None:
        """Name of the evaluated samples for people; None: nothing is evaluated."""
        if self.dev_percent:
            return f"{self.dev_percent:g} % of {self.train_split!r} held out"
        if self.val_split is None:
            return None
        return repr(self.val_split)


def data_problems(data: DataSettings) -> Problems:
    """Settings that are not allowed, exclude each other or have no effect."""
    common = [*_problems(data)]
    for key, what in common:
        yield f"data.{key}", what

    # What a view does not set is that of `data`, whose problems are told once.
    for number, view in enumerate(data.views):
        for problem in _problems(data.of_view(view)):
            if problem not in common:
                key, what = problem
                yield f"data.views.{number}.{key}", what


def _problems(data: DataSettings) -> Problems:
    """The problems of all keys, which begin below `data`."""
    for key, path in [
        ("path", data.path),
        *(("mixture", part.path) for part in data.mixture),
    ]:
        try:
            is_remote = isinstance(location_of(path), Url)
        except UserError as error:
            yield key, error.what
            continue
        if is_remote and data.is_streamed:
            yield (
                "path",
                "needs an index (data.reader=index), or a local copy of the tars",
            )
        elif is_remote and data.remote.cache_path is None:
            what = f"missing; {path} is fetched to a folder on a local disk"
            yield "remote.cache_path", what

    if not data.is_streamed:
        yield from _unused(data, "webdataset", by="data.reader=index")
    else:
        yield from _unused(
            data, *NEEDS_INDEX, "remote.cache_path", by="data.reader=webdataset"
        )
        if data.val_split is not None:
            yield (
                "val_split",
                "needs an index (data.reader=index); or set it to null",
            )
        if data.webdataset.num_samples is None:
            yield (
                "webdataset.num_samples",
                "missing; data.reader=webdataset needs it",
            )

    if data.crop != "squash":
        yield from _unused(data, "crop_share", by=f"data.crop={data.crop}")
    if data.crop in ("plain", "squash"):
        yield from _unused(
            data, "crop_area", "crop_aspect", by=f"data.crop={data.crop}"
        )
    if data.eval_interpolation == "area":
        yield from _unused(data, "eval_antialias", by="data.eval_interpolation=area")

    augment = data.augment
    ranges = {"crop_area": data.crop_area, "crop_aspect": data.crop_aspect}
    if augment.blur is not None:
        ranges["augment.blur.sigma"] = augment.blur.sigma
    for key, (low, high) in ranges.items():
        if not 0 < low <= high:
            yield key, f"({low}, {high}) is not an increasing pair above 0"

    views = [view.name for view in data.views]
    if len(views) > len(set(views)):
        yield "views", f"two views have one name: {', '.join(views)}; rename one"

    mixing = data.mixing
    if mixing is not None and not (mixing.mixup_alpha or mixing.cutmix_alpha):
        yield (
            "mixing",
            "mixes nothing; set mixup_alpha or cutmix_alpha, or set it to null",
        )

    rest = augment.model_dump(
        exclude={"three_augment", "erasing"}, exclude_defaults=True
    )
    if augment.three_augment and rest:
        what = f"goes with erasing alone; remove it, or {', '.join(rest)}"
        yield "augment.three_augment", what
    policy = augment.randaugment
    if policy is not None and policy.policy == "augreg":
        names = ("magnitude_std", "fill", "interpolation")
        keys = [f"augment.randaugment.{name}" for name in names]
        yield from _unused(data, *keys, by="policy=augreg")
    elif policy is not None and policy.magnitude > 10:
        what = f"{policy.magnitude}: policy timm allows at most 10"
        yield "augment.randaugment.magnitude", what


def _unused(data: DataSettings, *keys: str, by: str) -> Problems:
    """Settings that are not at their defaults, and that another one makes useless."""
    for key in keys:
        *groups, name = key.split(".")
        section: Section = reduce(getattr, groups, data)
        if getattr(section, name) != type(section).model_fields[name].default:
            yield key, f"has no effect with {by}; remove it, or set its default"
