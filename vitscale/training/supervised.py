"""Supervised classification, the objective of the ViT paper and of fine-tuning; distillation.

Needs no torch when imported. Leaves out: the teacher (`teacher`), the student's token and heads
(`vitscale.models.vit`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, PositiveInt

from vitscale.config.section import NamedSection, Section
from vitscale.training.objective import Objective

if TYPE_CHECKING:
    import torch

    from vitscale.data.loader import Batch
    from vitscale.distributed.world import World
    from vitscale.engine.engine import Engine
    from vitscale.engine.settings import EngineSettings
    from vitscale.training.teacher import Teacher


class SupervisedSettings(NamedSection):
    name: Literal["supervised"] = "supervised"
    """The class of each image is predicted from the class token or the pooled tokens."""
    loss: Literal["softmax", "sigmoid", "bce"] = "softmax"
    """sigmoid: binary cross-entropy SUMMED over classes, averaged over the batch (ViT on 21k). bce:
    averaged over classes too, mixed labels both count in full (DeiT-III on ImageNet-1k)."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Share of the target spread evenly over all classes; softmax and sigmoid only."""

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.label_smoothing and self.loss == "bce":
            what = f"has no effect on the {self.loss} loss"
            yield ("objective.label_smoothing", f"{what}; set it to 0")


class Supervised(Objective):
    Settings: ClassVar[type[NamedSection]] = SupervisedSettings

    def loss(self, engine: Engine, batch: Batch) -> torch.Tensor:
        return self.label_loss(engine.logits(batch.images), batch)

    def label_loss(self, logits_BC: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Mean loss of the logits against the batch's labels, mixed or not; scalar."""
        from vitscale.training.losses import label_loss

        return label_loss(
            logits_BC,
            batch.labels,
            kind=self.settings.loss,
            smoothing=self.settings.label_smoothing,
            mixed_labels_B=batch.mixed_labels,
            mix_lambda_B=batch.mix_lambda,
        )


class TeacherSettings(Section):
    """The model whose predictions are the student's second target. It is never trained."""

    model: str | None = None
    """timm's name, for example regnety_160 (DeiT's teacher); null: `weights` is a run of ours."""
    weights: str
    """Weights of `model`: .safetensors, .npz, or a torch file of tensors alone (.pth, .pt; also
    below the key `model`, as DeiT's teacher). With model=null a run folder or checkpoint folder."""
    image_size: PositiveInt | None = None
    """Pixels a side that the teacher sees; images are resized to it. null: its own."""


class DistillationSettings(SupervisedSettings):
    name: Literal["distillation"] = "distillation"  # type: ignore[assignment]  # another entry
    """Labels and a teacher's predictions are learned together. Touvron et al. 2021 (DeiT), sec. 3.
    With model.distillation_token each has a head of its own; without, one head learns both.
    Metrics: `train/label_loss`, `train/teacher_loss`; `train/teacher_agreement`: share of the
    images for which the student's class is the teacher's."""
    teacher: TeacherSettings
    kind: Literal["hard", "soft"] = "hard"
    """hard: cross-entropy with the teacher's class. soft: divergence from its probabilities."""
    alpha: float = Field(default=0.5, gt=0, lt=1)
    """Share of the teacher in the loss. DeiT 0.5 (hard) and 0.1 (soft)."""
    tau: float = Field(default=1.0, gt=0)
    """soft only: temperature of both softmaxes. DeiT's paper 3, its code 1."""

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from super().problems()
        if self.kind == "hard" and self.tau != 1.0:
            yield ("objective.tau", "has no effect on hard distillation; set it to 1")


class Distillation(Supervised):
    """The teacher is no part of the model: it has no gradients, is in no checkpoint, and every
    rank holds all of it, whatever the ZeRO stage."""

    Settings = DistillationSettings
    teacher: Teacher

    def prepare(self, *, num_classes: int, world: World, engine: EngineSettings) -> dict[str, Any]:
        from vitscale.training.teacher import open_teacher

        chosen = self.settings.teacher.model_dump()
        self.teacher = open_teacher(**chosen, num_classes=num_classes, world=world, engine=engine)
        return {"teacher": self.teacher.fingerprint}

    def loss(self, engine: Engine, batch: Batch) -> torch.Tensor:
        from vitscale.training.losses import hard_loss, soft_loss

        settings = self.settings
        teacher_BC = self.teacher.logits(batch.images)
        if "heads" in engine.known_outputs:  # the student has a distillation token
            class_BC, student_BC = engine.forward(batch.images, "heads")
        else:
            class_BC = student_BC = engine.logits(batch.images)
        if settings.kind == "hard":
            distilled = hard_loss(student_BC, teacher_BC)
        else:
            distilled = soft_loss(student_BC, teacher_BC, tau=settings.tau)
        labelled = self.label_loss(class_BC, batch)
        self.record("train/label_loss", labelled)
        self.record("train/teacher_loss", distilled)
        agreed_B = student_BC.argmax(dim=1) == teacher_BC.argmax(dim=1)
        self.record("train/teacher_agreement", agreed_B.float().mean())
        return (1 - settings.alpha) * labelled + settings.alpha * distilled

    def notes(self) -> Iterator[str]:
        settings = self.settings.teacher
        yield f"{self.settings.kind}, from {settings.model or settings.weights}"
        yield "without the costs of the teacher"
