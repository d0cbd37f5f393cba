"""Supervised classification: the objective of the ViT paper, and of fine-tuning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from vitscale.config.section import NamedSection
from vitscale.training.objective import Objective

if TYPE_CHECKING:
    import torch

    from vitscale.data.loader import Batch
    from vitscale.engine.engine import Engine


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
        from vitscale.training.losses import LOSSES

        return LOSSES[self.settings.loss](
            logits_BC,
            batch.labels,
            self.settings.label_smoothing,
            mixed_labels_B=batch.mixed_labels,
            mix_lambda_B=batch.mix_lambda,
        )
