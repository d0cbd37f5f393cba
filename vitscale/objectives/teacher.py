"""Open a teacher: a trained model that another one learns from.

It is in eval mode, without gradients, and sees its own pixels. Leaves out the losses against it
(`vitscale.objectives.losses`). B: batch, C: classes, D: width, L: patches, R: images that pass
through it together, S: image size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from vitscale.checkpoint.folders import MANIFEST
from vitscale.config.errors import UserError
from vitscale.distributed.atomic_files import blake3_of_file
from vitscale.distributed.world import World
from vitscale.engine.engine import is_compiled, resolve_precision
from vitscale.engine.settings import EngineSettings
from vitscale.evaluation.classes import column_of_each_class
from vitscale.evaluation.trained_model import (
    InferenceModel,
    TrainedModel,
    open_model,
)
from vitscale.models import timm_model
from vitscale.models.registry import MODELS, costs_of
from vitscale.models.settings import TimmSettings
from vitscale.models.weights.files import SUFFIXES
from vitscale.objectives.settings import TeacherSettings

# Images that pass through a teacher together on a CPU. Measured, November 2026: from 8 on ViTs give
# the same bits with one thread and two, and an image costs no more than in larger batches.
ROWS_ON_CPU = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenModel:
    """A model that is never trained. It keeps no state."""

    model: InferenceModel
    opened: TrainedModel
    fingerprint: str
    """Hashes of the files with its weights, or where these are, and what the same weights would be
    another teacher without: model, image size, mean and std."""

    @torch.no_grad()
    def forward(self, images_B3SS: torch.Tensor, output: str) -> Any:
        """The student's images, uint8 or mixed float 0..255 -> an output of the model."""
        # The student's augmentation is kept: the teacher judges the same view (DeiT, sec. 3).
        size = self.opened.arch.image_size
        if images_B3SS.shape[-1] != size:
            images_B3SS = F.interpolate(
                images_B3SS.float(), size=(size, size), mode="bicubic", antialias=True
            ).clamp_(0, 255)
        return self.model.forward(images_B3SS, output)


@dataclass(frozen=True, kw_only=True, slots=True)
class Teacher:
    """A classifier."""

    frozen: FrozenModel
    columns_C: torch.Tensor
    """Its output for each class of the data."""
    messages: tuple[str, ...]
    """Lines about it for the start of the log."""

    def logits(self, images_B3SS: torch.Tensor) -> torch.Tensor:
        """The student's images -> fp32 logits [B, classes]."""
        logits_BC: torch.Tensor = self.frozen.forward(images_B3SS, "logits")
        return logits_BC.float()[:, self.columns_C]


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureTeacher:
    """A model whose features are learned; its head, if it has one, is not used."""

    frozen: FrozenModel
    width: int
    """Of its features and of its patches."""
    grid: tuple[int, int] | None
    """Rows and columns of its patches; None: it has none, or of another width."""

    @property
    def fingerprint(self) -> str:
        return self.frozen.fingerprint

    @property
    def num_parameters(self) -> int:
        arch = self.frozen.opened.arch
        return int(costs_of(arch).num_parameters(arch))

    @property
    def flops_per_image(self) -> int:
        """Model FLOPs of its forward pass."""
        arch = self.frozen.opened.arch
        # A step of training is three forward passes.
        return int(costs_of(arch).train_flops_per_image(arch)) // 3

    def features(
        self, images_B3SS: torch.Tensor, *, patch_grid: tuple[int, int] | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The student's images -> class token or pooled features [B, D], patches [B, L, D]; fp32.

        patch_grid: rows and columns that the patches are pooled to; None: none are returned.
        On a CPU an image has the same bits in any batch, at any place.
        """
        # Kernels are chosen by the number of rows, and threads share these.
        num_images = len(images_B3SS)
        size = num_images
        if self.frozen.model.world.device.type == "cpu":
            size = ROWS_ON_CPU
        padding = (0, 0, 0, 0, 0, 0, 0, -num_images % size)

        classes = []
        patches = []
        for part_R3SS in F.pad(images_B3SS, padding).split(size):
            if patch_grid is None:
                class_RD = self.frozen.forward(part_R3SS, "features")
            else:
                assert self.grid is not None
                class_RD, patches_RLD = self.frozen.forward(part_R3SS, "tokens")
                pooled_RLD = pooled_patches(patches_RLD.float(), self.grid, patch_grid)
                patches.append(pooled_RLD)
            classes.append(class_RD.float())
        class_BD = torch.cat(classes)[:num_images]
        if patch_grid is None:
            return class_BD, None
        return class_BD, torch.cat(patches)[:num_images]


def square_grid(num_patches: int) -> tuple[int, int] | None:
    """Rows and columns of the patches of a square image; None where they are no square."""
    side = math.isqrt(num_patches)
    if side * side != num_patches:
        return None
    return (side, side)


def pooled_patches(
    patches_BLD: torch.Tensor, grid: tuple[int, int], target_grid: tuple[int, int]
) -> torch.Tensor:
    """Means of patches over the area of each patch of another grid, [B, L of it, D].

    A patch that lies in two of them counts in both, by its shares. On a finer grid patches repeat.
    """
    if grid == target_grid:
        return patches_BLD
    rows_RS, columns_RS = (
        _shares(source, target, patches_BLD)
        for source, target in zip(grid, target_grid, strict=True)
    )
    # A product of matrices has a backward pass that is the same in each run, also on a GPU.
    shares_LM = torch.kron(rows_RS, columns_RS)
    return shares_LM @ patches_BLD


def _shares(source: int, target: int, like: torch.Tensor) -> torch.Tensor:
    """Share of each of `source` equal intervals in each of `target` ones, [target, source]."""
    starts_S = torch.arange(source, dtype=torch.float64) * target
    starts_T1 = torch.arange(target, dtype=torch.float64)[:, None] * source
    ends_TS = torch.minimum(starts_S + target, starts_T1 + source)
    overlap_TS = (ends_TS - torch.maximum(starts_S, starts_T1)).clamp(min=0)
    return (overlap_TS / source).to(like)


def open_teacher(
    settings: TeacherSettings,
    *,
    classes: Sequence[str],
    world: World,
    engine: EngineSettings,
) -> Teacher:
    """Load the teacher, in the run's precision and compiled as the run's model is.

    classes: of the data.
    Raises UserError for an unknown name, a missing or unfit file, an image size that the teacher
    cannot take, and other classes.
    """
    frozen = _open(settings, key="objective.teacher", world=world, engine=engine)
    opened = frozen.opened
    # The number of outputs comes first: weights without class names are matched by position.
    next_step = "take a teacher of the same classes, or train one on these shards"
    if opened.num_classes != len(classes):
        raise UserError(
            f"the teacher predicts {opened.num_classes} classes, but the label map has "
            f"{len(classes)}",
            where=opened.source,
            next_step=next_step,
        )
    matched = column_of_each_class(
        opened.classes, classes, num_outputs=opened.num_classes
    )
    lacking = matched.lacking(classes)
    if lacking:
        raise UserError(
            f"the teacher does not predict {len(lacking)} of {len(classes)} classes, such as "
            f"{lacking[0]!r}",
            where=opened.source,
            next_step=next_step,
        )
    # A person should see at once that names were matched by their meaning or by position alone.
    messages = []
    if matched.how:
        messages.append(f"the teacher's classes are {matched.how}")
    return Teacher(
        frozen=frozen,
        columns_C=torch.tensor(matched.columns, device=world.device),
        messages=tuple(messages),
    )


def open_feature_teacher(settings: TeacherSettings, **how: Any) -> FeatureTeacher:
    """Load a teacher of features, with a head or without; otherwise as `open_teacher`.

    how: `key`, the section of its settings for errors, `world` and `engine`.
    """
    frozen = _open(settings, **how)
    # Models of timm have no other sign of what they return than to return it.
    size = frozen.opened.arch.image_size
    black = torch.zeros(1, 3, size, size, dtype=torch.uint8)
    features_1D = frozen.forward(black, "features")
    width = features_1D.shape[1]
    grid = None
    network: Any = frozen.model.network
    if hasattr(network, "num_prefix_tokens"):
        # Plain patches leave out the pixels at the border. Stems of convolutions, which have no
        # ratio, pad it instead.
        patch_embed = getattr(network, "patch_embed", None)
        ratio = getattr(patch_embed, "feat_ratio", lambda: 1)
        patch_size = ratio()
        if size % patch_size:
            raise UserError(
                f"{size} px is no multiple of the {patch_size} px patch",
                where=f"{how['key']}.image_size",
                next_step="correct it",
            )
        _, patches = frozen.forward(black, "tokens")
        # Some return maps, or patches of another width than their pooled features.
        if patches.ndim == 3 and patches.shape[2] == width:
            grid = square_grid(patches.shape[1])
    return FeatureTeacher(frozen=frozen, width=width, grid=grid)


def _open(
    settings: TeacherSettings, *, key: str, world: World, engine: EngineSettings
) -> FrozenModel:
    """Load a model. key: the section of its settings, for errors."""
    model = settings.model
    image_size = settings.image_size
    # A run of ours names its own architecture; a file of weights alone does not.
    timm_settings = None
    if model is not None:
        config = timm_model.pretrained_config(model, where=f"{key}.model")
        timm_settings = TimmSettings(
            model=model, image_size=image_size or config.input_size[-1]
        )
    opened = open_model(
        settings.weights,
        model=timm_settings,
        image_size=image_size,
        key=f"{key}.weights",
        world=world,
    )

    # A resumed run must learn from the same teacher. A manifest holds the hashes of all weights,
    # and the source of a repository names its commit.
    weights = Path(settings.weights)
    if opened.run is not None:
        weights = opened.run.checkpoint.folder / MANIFEST
    files = [weights]
    if weights.is_dir():
        kinds = (*SUFFIXES, ".json")
        files = sorted(file for file in weights.iterdir() if file.suffix in kinds)
    fingerprint = opened.source
    if weights.exists():
        fingerprint = " ".join(map(blake3_of_file, files))
    # Names of timm share weights, but not activations, pixels or pools.
    arch = opened.arch
    pixels = opened.preprocessing
    fingerprint += f" as {arch.title} at {arch.image_size} px, "
    fingerprint += f"mean {pixels.mean}, std {pixels.std}"

    # Its forward pass runs beside the student's in every step, so it must be as fast.
    dtype = resolve_precision(engine, world.device)
    if is_compiled(engine, world.device):
        MODELS[opened.arch.name].load().compile_blocks(opened.network)
    inference = InferenceModel(
        opened.network, pixels=opened.preprocessing, world=world, dtype=dtype
    )
    return FrozenModel(model=inference, opened=opened, fingerprint=fingerprint)
