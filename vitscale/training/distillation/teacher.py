"""Load a teacher and evaluate it: in eval mode, without gradients, on its own pixels.

Leaves out: the losses (`losses`), models and their files (`vitscale.models`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from vitscale.checkpoint.folders import MANIFEST, resolve_weights
from vitscale.config.errors import UserError
from vitscale.distributed.atomic_files import blake3_of_file
from vitscale.evaluation.models.preprocessing import Normalization
from vitscale.evaluation.models.trained_model import (
    TrainedModel,
    read_trained_model,
    starting_weights,
)
from vitscale.models import timm_model
from vitscale.models.interface.misfits import refuse_misfits
from vitscale.models.timm_settings import TimmSettings
from vitscale.models.weights.reading import is_weight_file, read_external_weights
from vitscale.models.weights.suffixes import SUFFIXES
from vitscale.models.weights.transfer import OBJECTIVE
from vitscale.training.distillation.settings import TeacherSettings

WEIGHTS_KEY = "objective.teacher.weights"
SIZE_KEY = "objective.teacher.image_size"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pixels:
    """What a teacher sees: images, normalised by (x / 255 - mean) / std."""

    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


class Teacher:
    """A model that is never trained. It keeps no state."""

    def __init__(
        self, model: nn.Module, *, pixels: Pixels, fingerprint: str, device: torch.device
    ) -> None:
        """fingerprint: of the file with its weights."""
        self.model = model.eval().requires_grad_(False).to(device)
        self.image_size, self.fingerprint = pixels.image_size, fingerprint
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.flops_per_image = 0
        self._normalize = Normalization(mean=pixels.mean, std=pixels.std, device=device)

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
        images_B3SS = self._normalize(images_B3SS)
        with torch.autocast(images_B3SS.device.type, dtype, enabled=dtype != torch.float32):
            logits_BC: torch.Tensor = self.model(images_B3SS)
        return logits_BC


def open_teacher(settings: TeacherSettings, *, num_classes: int, device: torch.device) -> Teacher:
    """Load the teacher and try it on one image.

    Raises UserError for an unknown name, a missing or unfit file, another number of classes than
    `num_classes`, and images that the teacher cannot take.
    """
    if settings.model is not None:
        model, pixels, fingerprint = _timm_model(settings.model, settings, num_classes=num_classes)
    else:
        model, pixels, fingerprint = _own_model(settings.weights, num_classes=num_classes)
    chosen = Pixels(
        image_size=settings.image_size or pixels.image_size,
        mean=pixels.mean,
        std=pixels.std,
    )
    teacher = Teacher(model, pixels=chosen, fingerprint=fingerprint, device=device)
    _try(teacher, own_size=pixels.image_size, num_classes=num_classes, device=device)
    return teacher


def _timm_model(
    name: str, settings: TeacherSettings, *, num_classes: int
) -> tuple[nn.Module, Pixels, str]:
    """A model of timm at the image size of the settings, with the weights of a file."""
    config = timm_model.pretrained_config(name, where="objective.teacher.model")
    pixels = Pixels(image_size=config.input_size[-1], mean=config.mean, std=config.std)
    path = Path(settings.weights)
    if not is_weight_file(str(path)):
        raise UserError(
            f"{path.suffix or 'a name without suffix'} is no kind of weight file",
            where=str(path),
            allowed=", ".join(SUFFIXES),
            next_step=f"set {WEIGHTS_KEY} to such a file",
        )
    chosen = TimmSettings(model=name, image_size=settings.image_size or pixels.image_size)
    external = read_external_weights(path, grid=None, model=chosen)
    model = timm_model.build_model(chosen, chosen.architecture(num_classes=num_classes), seed=0)
    model.load_weights(external.weights, where=str(path), keep_head=True)
    return model, pixels, blake3_of_file(path)


def _own_model(weights: str, *, num_classes: int) -> tuple[nn.Module, Pixels, str]:
    """A run's newest checkpoint, or one checkpoint; the average of its weights if it has one."""
    if Path(weights).is_file():
        raise UserError(
            f"{weights} is a file, but objective.teacher.model does not say of which model",
            where=WEIGHTS_KEY,
            next_step="set objective.teacher.model, or weights to a run folder",
        )
    checkpoint, _ = resolve_weights(weights, key=WEIGHTS_KEY)
    trained: TrainedModel = read_trained_model(checkpoint)
    if trained.arch.num_classes != num_classes:
        raise _other_classes(trained.arch.num_classes, num_classes, where=str(checkpoint.folder))
    model = trained.build()
    given = {
        name: tensor
        for name, tensor in starting_weights(checkpoint, "auto").items()
        if not name.startswith(OBJECTIVE)
    }
    refuse_misfits(
        model.state_dict(),
        given,
        where=str(checkpoint.folder),
        next_step="take the run folder that wrote this checkpoint",
    )
    model.load_state_dict(given)
    pixels = Pixels(
        image_size=trained.arch.image_size,
        mean=trained.preprocessing.mean,
        std=trained.preprocessing.std,
    )
    return model, pixels, blake3_of_file(checkpoint.folder / MANIFEST)


def _other_classes(found: int, wanted: int, *, where: str) -> UserError:
    return UserError(
        f"the teacher predicts {found} classes, but the label map has {wanted}",
        where=where,
        next_step="take a teacher of the same classes, or train one on these shards",
    )


def _try(teacher: Teacher, *, own_size: int, num_classes: int, device: torch.device) -> None:
    """One forward pass: whether the size suits, and its FLOPs."""
    size = teacher.image_size
    image = torch.zeros(1, 3, size, size, device=device)
    try:
        with FlopCounterMode(display=False) as counter:
            logits_BC = teacher.logits(image, dtype=torch.float32)
    except (AssertionError, RuntimeError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [repr(error)])[0]
        raise UserError(
            f"the teacher cannot take images of {size} px ({reason})",
            where=SIZE_KEY,
            next_step=f"set it to null or {own_size}, its own size"
            if size != own_size
            else "set it to a size that the teacher takes",
        ) from None
    if logits_BC.shape != (1, num_classes):
        raise _other_classes(logits_BC.shape[-1], num_classes, where=WEIGHTS_KEY)
    teacher.flops_per_image = counter.get_total_flops()
