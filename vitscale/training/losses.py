"""Losses of logits against labels, mixed or not, and against a teacher, as recipes define them.

Each is a mean over the batch in fp32. A teacher is in eval mode, without gradients, and sees its
own pixels. B: batch, C: classes.
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
        chosen = TimmSettings(model=model, image_size=image_size or config.input_size[-1])
    key = "objective.teacher.weights"
    opened = open_model(weights, model=chosen, image_size=image_size, key=key, world=world)
    next_step = "take a teacher of the same classes, or train one on these shards"
    num_outputs = opened.num_classes
    if num_outputs != len(classes):
        what = f"the teacher predicts {num_outputs} classes, but the label map has {len(classes)}"
        raise UserError(what, where=opened.source, next_step=next_step)
    matched = column_of_each_class(opened.classes, classes, num_outputs=num_outputs)
    if lacking := matched.lacking(classes):
        what = f"the teacher does not predict {len(lacking)} of {len(classes)} classes, such as "
        raise UserError(f"{what}{lacking[0]!r}", where=opened.source, next_step=next_step)
    file = Path(weights) if opened.run is None else opened.run.checkpoint.folder / MANIFEST
    dtype = resolve_precision(engine, world.device)
    if is_compiled(engine, world.device):
        MODELS[opened.arch.name].load().compile_blocks(opened.network)
    return Teacher(
        model=InferenceModel(opened.network, pixels=opened.preprocessing, world=world, dtype=dtype),
        columns_C=torch.tensor(matched.columns, device=world.device),
        image_size=opened.arch.image_size,
        # A source names the commit of a repository.
        fingerprint=blake3_of_file(file) if file.is_file() else opened.source,
        said=(f"the teacher's classes are {matched.how}",) if matched.how else (),
    )


def label_loss(
    logits_BC: torch.Tensor,
    labels_B: torch.Tensor,
    *,
    kind: str = "softmax",
    smoothing: float = 0.0,
    mixed_labels_B: torch.Tensor | None = None,
    mix_lambda_B: torch.Tensor | None = None,
) -> torch.Tensor:
    """Loss against labels; with mixing against lambda * label + (1 - lambda) * mixed label.

    softmax: cross-entropy, label smoothing as in Szegedy et al. 2016, sec. 7.

    sigmoid: binary cross-entropy SUMMED over classes. PyTorch's mean over classes would divide
    gradients by their number: at 21,843 classes a gradient clip at norm 1 would never act. Source:
    big_vision's `sigmoid_xent`. Written as softplus(x) - x at the label: torch's own form subtracts
    numbers near 10 to get 4.5e-5 per class, in fp32 0.8 % off at a head bias of -10. Smoothing
    spreads its share evenly over all classes, so the targets of an image still sum to 1.

    bce: averaged over classes too, mixed labels both count as 1. Source: DeiT-III on ImageNet-1k,
    `--bce-loss`: every target above 0 is set to 1.
    """
    logits_BC = logits_BC.float()
    if kind == "softmax" and mixed_labels_B is None:
        return F.cross_entropy(logits_BC, labels_B, label_smoothing=smoothing)
    values_BC = F.log_softmax(logits_BC, dim=1) if kind == "softmax" else logits_BC
    labelled_B = values_BC.gather(1, labels_B[:, None])[:, 0]
    if mixed_labels_B is not None:
        assert mix_lambda_B is not None
        own_B, other_B = mix_lambda_B, 1 - mix_lambda_B
        if kind == "bce":
            is_same_B = mixed_labels_B == labels_B
            own_B, other_B = (own_B > 0) | is_same_B, (own_B < 1) & ~is_same_B
        mixed_B = values_BC.gather(1, mixed_labels_B[:, None])[:, 0]
        labelled_B = own_B * labelled_B + other_B * mixed_B
    if smoothing:
        labelled_B = (1 - smoothing) * labelled_B + smoothing * values_BC.mean(dim=1)
    if kind == "softmax":
        return -labelled_B.mean()
    loss = (F.softplus(logits_BC).sum(dim=1) - labelled_B).mean()
    return loss / logits_BC.shape[1] if kind == "bce" else loss


def hard_loss(student_BC: torch.Tensor, teacher_BC: torch.Tensor) -> torch.Tensor:
    """Cross-entropy with the teacher's most likely class, not smoothed.

    Source: Touvron et al. 2021, eq. 3.
    """
    return F.cross_entropy(student_BC.float(), teacher_BC.argmax(dim=1))


def soft_loss(student_BC: torch.Tensor, teacher_BC: torch.Tensor, *, tau: float) -> torch.Tensor:
    """tau^2 KL(teacher, student) at temperature tau.

    Source: Touvron et al. 2021, eq. 2; DeiT's `losses.py` divides by the number of logits, B * C.
    """
    student_BC, teacher_BC = (
        F.log_softmax(logits_BC.float() / tau, dim=1) for logits_BC in (student_BC, teacher_BC)
    )
    divergence = F.kl_div(student_BC, teacher_BC, reduction="batchmean", log_target=True)
    return tau**2 * divergence
