"""Settings of distillation and its teacher. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, PositiveInt

from vitscale.config.section import Section
from vitscale.training.supervised import SupervisedSettings


class TeacherSettings(Section):
    """The model whose predictions are the student's second target. It is never trained."""

    model: str | None = None
    """timm's name, for example regnety_160 (DeiT's teacher); null: `weights` is a run of ours."""
    weights: str
    """Weights of `model`: .safetensors, .npz, or a torch file of tensors alone (.pth, .pt; also
    below the key `model`, as DeiT's teacher). With model=null a run folder or checkpoint folder."""
    image_size: PositiveInt | None = None
    """Pixels a side that the teacher sees; mixed images are
    resized to it. null: its own."""


class DistillationSettings(SupervisedSettings):
    name: Literal["distillation"] = "distillation"  # type: ignore[assignment]  # another entry
    """Labels and a teacher's predictions are learned together. Touvron et al. 2021 (DeiT), sec. 3.
    With model.distillation_token each has a head of its own; without, one head learns both."""
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
