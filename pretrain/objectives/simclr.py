"""SimCLR: two views of an image are recognised among the views of all other images.

Source: Chen et al. 2020 (A Simple Framework for Contrastive Learning of Visual Representations).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import PositiveFloat, PositiveInt

from pretrain.objectives.views import ViewObjective, split_by_kind
from vitscale.config.section import NamedSection
from vitscale.models.registry import costs_of

if TYPE_CHECKING:
    import torch

    from vitscale.data.loader import Batch
    from vitscale.engine.engine import Engine


class SimclrSettings(NamedSection):
    name: Literal["simclr"] = "simclr"
    """Each of two views of an image is recognised among those of all other images of the global
    batch, without labels; none is accumulated. Chen et al. 2020. Metric: `train/view_accuracy`, the
    share of views whose nearest one is of the same image."""
    temperature: PositiveFloat = 0.1
    """Cosines are divided by it; 0.1 is the best of 0.05 to 1 in table 5."""
    projection_width: PositiveInt = 128
    """Outputs of the head that the loss compares; evaluations and transfer read what is below."""


class Simclr(ViewObjective):
    Settings = SimclrSettings
    settings: SimclrSettings
    takes_local = False

    def extend_model(self, model: Any, arch: Any) -> None:
        from pretrain.objectives.contrast import Projection

        super().extend_model(model, arch)
        width = self.settings.projection_width
        model.objective = Projection(costs_of(arch).feature_width(arch), width)

    def head_layers(self, arch: Any) -> list[tuple[int, int, int]]:
        width = costs_of(arch).feature_width(arch)
        outputs = self.settings.projection_width
        return [(width, width, width), (width, outputs, outputs)]

    def loss(self, engine: Engine, batch: Batch) -> torch.Tensor:
        from pretrain.objectives.contrast import contrastive_loss

        # The two views of an image are neighbours.
        views_B23SS, _ = split_by_kind(batch)
        projected_NE = engine.forward(views_B23SS.flatten(0, 1), "objective")
        loss, accuracy = contrastive_loss(
            projected_NE, temperature=self.settings.temperature
        )
        self.record("train/view_accuracy", accuracy)
        return loss
