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
    said: tuple[str, ...]
    """What to say about it at the start."""

    @torch.no_grad()
    def logits(self, images_B3SS: torch.Tensor) -> torch.Tensor:
        """The student's images, uint8 or mixed float 0..255 -> logits [B, classes]."""
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
    chosen = None
    if model is not None:
        config = timm_model.pretrained_config(model, where="objective.teacher.model")
        chosen = TimmSettings(
            model=model, image_size=image_size or config.input_size[-1]
        )
    key = "objective.teacher.weights"
    opened = open_model(
        weights, model=chosen, image_size=image_size, key=key, world=world
    )
    next_step = "take a teacher of the same classes, or train one on these shards"
    num_outputs = opened.num_classes
    if num_outputs != len(classes):
        what = f"the teacher predicts {num_outputs} classes, but the label map has {len(classes)}"
        raise UserError(what, where=opened.source, next_step=next_step)
    matched = column_of_each_class(opened.classes, classes, num_outputs=num_outputs)
    if lacking := matched.lacking(classes):
        what = f"the teacher does not predict {len(lacking)} of {len(classes)} classes, such as "
        raise UserError(
            f"{what}{lacking[0]!r}", where=opened.source, next_step=next_step
        )
    file = (
        Path(weights) if opened.run is None else opened.run.checkpoint.folder / MANIFEST
    )
    dtype = resolve_precision(engine, world.device)
    if is_compiled(engine, world.device):
        MODELS[opened.arch.name].load().compile_blocks(opened.network)
    return Teacher(
        model=InferenceModel(
            opened.network, pixels=opened.preprocessing, world=world, dtype=dtype
        ),
        columns_C=torch.tensor(matched.columns, device=world.device),
        image_size=opened.arch.image_size,
        # A source names the commit of a repository.
        fingerprint=blake3_of_file(file) if file.is_file() else opened.source,
        said=(f"the teacher's classes are {matched.how}",) if matched.how else (),
    )
