"""Open a teacher: a trained model that another one learns from.

It is in eval mode, without gradients, and sees its own pixels. Leaves out the losses against it
(`vitscale.objectives.losses`). B: batch, C: classes, S: image size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from vitscale.checkpoint.folders import MANIFEST
from vitscale.config.errors import UserError
from vitscale.distributed.atomic_files import blake3_of_file
from vitscale.distributed.world import World
from vitscale.engine.engine import is_compiled, resolve_precision
from vitscale.engine.settings import EngineSettings
from vitscale.evaluation.classes import column_of_each_class
from vitscale.evaluation.trained_model import InferenceModel, open_model
from vitscale.models import timm_model
from vitscale.models.registry import MODELS
from vitscale.models.settings import TimmSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Teacher:
    """A model that is never trained. It keeps no state."""

    model: InferenceModel
    columns_C: torch.Tensor
    """Its output for each class of the data."""
    image_size: int
    fingerprint: str
    """Hash of the file with its weights."""
    messages: tuple[str, ...]
    """Lines about it for the start of the log."""

    @torch.no_grad()
    def logits(self, images_B3SS: torch.Tensor) -> torch.Tensor:
        """The student's images, uint8 or mixed float 0..255 -> logits [B, classes]."""
        # The student's augmentation is kept: the teacher judges the same view (DeiT, sec. 3).
        size = self.image_size
        if images_B3SS.shape[-1] != size:
            images_B3SS = F.interpolate(
                images_B3SS.float(), size=(size, size), mode="bicubic", antialias=True
            ).clamp_(0, 255)
        return self.model.logits(images_B3SS)[:, self.columns_C]


def open_teacher(
    weights: str,
    *,
    model: str | None,
    image_size: int | None,
    classes: Sequence[str],
    world: World,
    engine: EngineSettings,
) -> Teacher:
    """Load the teacher, in the run's precision and compiled as the run's model is.

    weights, model, image_size: the settings of `objective.teacher`. classes: of the data.
    Raises UserError for an unknown name, a missing or unfit file, an image size that the teacher
    cannot take, and other classes.
    """
    # A run of ours names its own architecture; a file of weights alone does not.
    timm_settings = None
    if model is not None:
        config = timm_model.pretrained_config(model, where="objective.teacher.model")
        timm_settings = TimmSettings(
            model=model, image_size=image_size or config.input_size[-1]
        )
    opened = open_model(
        weights,
        model=timm_settings,
        image_size=image_size,
        key="objective.teacher.weights",
        world=world,
    )

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

    # A resumed run must learn from the same teacher. A manifest holds the hashes of all weights,
    # and the source of a repository names its commit.
    weights_file = Path(weights)
    if opened.run is not None:
        weights_file = opened.run.checkpoint.folder / MANIFEST
    fingerprint = opened.source
    if weights_file.is_file():
        fingerprint = blake3_of_file(weights_file)

    # Its forward pass runs beside the student's in every step, so it must be as fast.
    dtype = resolve_precision(engine, world.device)
    if is_compiled(engine, world.device):
        MODELS[opened.arch.name].load().compile_blocks(opened.network)
    inference = InferenceModel(
        opened.network, pixels=opened.preprocessing, world=world, dtype=dtype
    )
    return Teacher(
        model=inference,
        columns_C=torch.tensor(matched.columns, device=world.device),
        image_size=opened.arch.image_size,
        fingerprint=fingerprint,
        messages=tuple(messages),
    )
