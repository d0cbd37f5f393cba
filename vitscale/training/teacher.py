"""Load a teacher and evaluate it: in eval mode, without gradients, on its own pixels.

Leaves out: the losses (`losses`), models and their files (`vitscale.models`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from vitscale.checkpoint.folders import MANIFEST
from vitscale.config.errors import UserError
from vitscale.distributed.atomic_files import blake3_of_file
from vitscale.engine.device_batches import Normalization
from vitscale.evaluation.trained_model import open_model
from vitscale.models import timm_model
from vitscale.models.settings import TimmSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Teacher:
    """A model that is never trained. It keeps no state."""

    model: nn.Module
    image_size: int
    normalize: Normalization
    fingerprint: str
    """Hash of the file with its weights."""

    @torch.no_grad()
    def logits(self, images_B3SS: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
        """The student's images, uint8 or mixed float 0..255 -> logits [B, classes].

        dtype: of the run; below fp32 the fp32 weights are rounded where they multiply.
        """
        images_B3SS = images_B3SS.float()
        size = self.image_size
        if images_B3SS.shape[-1] != size:
            images_B3SS = F.interpolate(
                images_B3SS, size=(size, size), mode="bicubic", antialias=True, align_corners=False
            ).clamp_(0, 255)
        images_B3SS = self.normalize(images_B3SS)
        with torch.autocast(images_B3SS.device.type, dtype, enabled=dtype != torch.float32):
            logits_BC: torch.Tensor = self.model(images_B3SS)
        return logits_BC


def open_teacher(
    weights: str,
    *,
    model: str | None,
    image_size: int | None,
    num_classes: int,
    device: torch.device,
) -> Teacher:
    """Load the teacher and try it on one image.

    weights, model, image_size: the settings of `objective.teacher`.
    Raises UserError for an unknown name, a missing or unfit file, another number of classes than
    `num_classes`, and images that the teacher cannot take.
    """
    chosen = None
    if model is not None:
        config = timm_model.pretrained_config(model, where="objective.teacher.model")
        own_size = config.input_size[-1]
        chosen = TimmSettings(model=model, image_size=image_size or own_size)
    opened = open_model(weights, model=chosen, key="objective.teacher.weights")
    if (found := opened.num_classes) != num_classes:
        raise UserError(
            f"the teacher predicts {found} classes, but the label map has {num_classes}",
            where=opened.source,
            next_step="take a teacher of the same classes, or train one on these shards",
        )
    if model is None:
        own_size = opened.arch.image_size
    file = Path(weights) if opened.run is None else opened.run.checkpoint.folder / MANIFEST
    pixels = opened.preprocessing
    teacher = Teacher(
        model=opened.network.eval().requires_grad_(False).to(device),
        image_size=image_size or own_size,
        normalize=Normalization(mean=pixels.mean, std=pixels.std, device=device),
        fingerprint=blake3_of_file(file),
    )
    size = teacher.image_size
    try:
        teacher.logits(torch.zeros(1, 3, size, size, device=device), dtype=torch.float32)
    except (AssertionError, RuntimeError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [repr(error)])[0]
        raise UserError(
            f"the teacher cannot take images of {size} px ({reason})",
            where="objective.teacher.image_size",
            next_step=f"set it to null or {own_size}, its own size",
        ) from None
    return teacher
