"""SimCLR: two views of an image are recognised among the views of all other images.

Source: Chen et al. 2020 (A Simple Framework for Contrastive Learning of Visual Representations).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from vitscale.config.section import NamedSection
from vitscale.objectives.objective import Objective

if TYPE_CHECKING:
    import torch

    from vitscale.data.loader import Batch
    from vitscale.engine.engine import Engine
    from vitscale.runs.training import TrainingRun

NUM_VIEWS = 2


class SimclrSettings(NamedSection):
    name: Literal["simclr"] = "simclr"
    """Each of two views of an image is recognised among those of all other images of the global
    batch, without labels; none is accumulated. Chen et al. 2020. Metric: `train/view_accuracy`, the
    share of views whose nearest one is of the same image."""
    temperature: float = Field(default=0.1, gt=0)
    """Cosines are divided by it; 0.1 is the best of 0.05 to 1 in table 5."""
    projection_width: int = Field(default=128, gt=0)
    """Outputs of the head that the loss compares; evaluations and transfer read what is below."""


class Simclr(Objective):
    Settings = SimclrSettings
    settings: SimclrSettings
    needs_labels = False
    trains_classifier = False
    reads_views = True
    couples = True

    def problems(self, run: TrainingRun) -> Iterator[tuple[str, str]]:
        yield from super().problems(run)
        if run.model.name != "vit":
            yield ("model.name", "simclr adds a head to a vit; set it to vit")

        sizes = {view.image_size or run.model.image_size for view in run.data.views}
        num_views = sum(view.count for view in run.data.views)
        if num_views != NUM_VIEWS or sizes != {run.model.image_size}:
            yield (
                "data.views",
                f"simclr compares {NUM_VIEWS} views of the model's {run.model.image_size} px, not "
                f"{num_views} of {sorted(sizes)}; set data.views=[{{name: global, count: 2}}]",
            )

    def extend_model(self, model: Any, arch: Any) -> None:
        from pretrain.objectives.contrast import Projection

        width = self.settings.projection_width
        model.objective = Projection(arch.feature_width, width)

    # ---- costs: both views pass through the encoder and the head

    def num_parameters(self, arch: Any) -> int:
        width = arch.feature_width
        hidden = width * width + width
        last = width * self.settings.projection_width + self.settings.projection_width
        return super().num_parameters(arch) + int(hidden + last)

    def train_flops_per_image(self, arch: Any) -> int:
        width = arch.feature_width
        head = width * width + width * self.settings.projection_width
        # A multiply-add is two operations, and the backward pass costs twice the forward pass.
        return NUM_VIEWS * (super().train_flops_per_image(arch) + 3 * 2 * int(head))

    def activation_bytes_per_image(self, arch: Any, **options: Any) -> int:
        return NUM_VIEWS * super().activation_bytes_per_image(arch, **options)

    # ---- training

    def loss(self, engine: Engine, batch: Batch) -> torch.Tensor:
        import torch

        from pretrain.objectives.contrast import contrastive_loss

        # The two views of an image become neighbours.
        views_B23SS = torch.cat(list(batch.views.values()), dim=1)
        projected_NE = engine.forward(views_B23SS.flatten(0, 1), "objective")
        loss, accuracy = contrastive_loss(
            projected_NE, temperature=self.settings.temperature
        )
        self.record("train/view_accuracy", accuracy)
        return loss
