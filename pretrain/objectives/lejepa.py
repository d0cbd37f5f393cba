"""LeJEPA: views of an image get one embedding, and the embeddings of all images a normal spread.

Source: Balestriero & LeCun 2025 (LeJEPA: Provable and Scalable Self-Supervised Learning Without the
Heuristics).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, PositiveInt

from pretrain.objectives.views import ViewObjective, split_by_kind
from vitscale.config.section import NamedSection
from vitscale.distributed.random_numbers import stream_key
from vitscale.models.registry import costs_of

# Points of the integral's right half (`isotropy.NUM_KNOTS`).
HALF_KNOTS = 9

if TYPE_CHECKING:
    import torch

    from vitscale.data.loader import Batch
    from vitscale.engine.engine import Engine


class LejepaSettings(NamedSection):
    name: Literal["lejepa"] = "lejepa"
    """All views of an image are drawn to the mean of its global ones, while the embeddings of each
    view over the global batch are held to a standard normal distribution (SIGReg), which keeps them
    from collapsing without a teacher. Balestriero & LeCun 2025. Metrics: `train/invariance`,
    `train/sigreg`, `train/sigreg_share` of what it is where all embeddings are zero,
    `train/spread` (1 where the features point everywhere, 0 where all are one)."""
    sigreg_weight: float = Field(default=0.05, gt=0, lt=1)
    """Share of SIGReg in the loss; 0.05 in the paper."""
    num_directions: PositiveInt = 1024
    """Random directions in which the distribution is tested, new ones at each step."""
    hidden_width: PositiveInt = 2048
    """Width of the two hidden layers of the projector."""
    projection_width: PositiveInt = 64
    """Outputs of the projector that the loss compares; evaluations and transfer read what is below
    it. 64 is the best of the paper."""


class Lejepa(ViewObjective):
    Settings = LejepaSettings
    settings: LejepaSettings

    def extend_model(self, model: Any, arch: Any) -> None:
        from pretrain.objectives.isotropy import Projector

        super().extend_model(model, arch)
        widths = [rows for rows, _, _ in self.head_layers(arch)]
        model.objective = Projector([*widths, self.settings.projection_width])

    def head_layers(self, arch: Any) -> list[tuple[int, int, int]]:
        width = costs_of(arch).feature_width(arch)
        hidden = self.settings.hidden_width
        outputs = self.settings.projection_width
        # A norm has a scale and a shift for each output, in place of a bias.
        return [
            (width, hidden, 2 * hidden),
            (hidden, hidden, 2 * hidden),
            (hidden, outputs, outputs),
        ]

    def head_bytes(self, arch: Any, *, precision: str) -> int:
        # A norm works in fp32: it keeps what is centred, and what is scaled.
        norms = 2 * 4 * 2 * self.settings.hidden_width
        # The angle of each projection and knot, its sine and its cosine.
        angles = 3 * 4 * self.settings.num_directions * HALF_KNOTS
        return super().head_bytes(arch, precision=precision) + norms + angles

    def loss(self, engine: Engine, batch: Batch) -> torch.Tensor:
        import torch

        from pretrain.objectives.isotropy import directions, sigreg, spread
        from vitscale.objectives.draws import on_device

        # Views of one size pass through the model together, those of an image side by side.
        embedded = []
        for views_BVCSS in split_by_kind(batch):
            if views_BVCSS is not None:
                embedded_NE = engine.forward(views_BVCSS.flatten(0, 1), "objective")
                shape = views_BVCSS.shape[:2]
                embedded.append(embedded_NE.float().unflatten(0, shape))
        embedded_BVE = torch.cat(embedded, dim=1)

        # The target moves, too: nothing is detached.
        center_B1E = embedded[0].mean(dim=1, keepdim=True)
        invariance = (embedded_BVE - center_B1E).square().mean()

        key = stream_key("directions", self.seed, self.step)
        directions_ED = directions(
            embedded_BVE.shape[2], self.settings.num_directions, key=key
        )
        # A device is not waited for.
        there_ED = on_device(directions_ED.numpy(), embedded_BVE.device)
        normality = sigreg(embedded_BVE.transpose(0, 1), there_ED)

        self.record("train/invariance", invariance)
        self.record("train/sigreg", normality)
        # Embeddings that are all zero have the same statistic in any width and direction.
        nothing = torch.zeros_like(embedded_BVE[None, :, 0, :1])
        share = normality / sigreg(nothing, torch.ones_like(nothing[0, :1]))
        self.record("train/sigreg_share", share)
        self.record("train/spread", spread(embedded[0][:, 0]))
        weight = self.settings.sigreg_weight
        return (1 - weight) * invariance + weight * normality
