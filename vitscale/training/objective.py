"""The interface of a training objective.

Owns: what the session asks of an objective, and whether a run's data can serve it.
Leaves out: the objectives (`supervised` here, the others in pretrain/objectives/).

Needs no torch when imported, and neither may a file with an objective: settings are validated on
machines without torch. Import torch inside the methods; modules belong into `vitscale.models`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from vitscale.config.errors import UserError
from vitscale.config.section import NamedSection

if TYPE_CHECKING:
    import torch
    from torch import nn

    from vitscale.data.loader import Batch
    from vitscale.engine.engine import Engine
    from vitscale.models.architecture import Architecture


class Objective:
    """What a run optimises. A subclass names its settings and defines `loss`."""

    Settings: ClassVar[type[NamedSection]]
    needs_labels: ClassVar[bool] = True
    """Whether `loss` reads `batch.labels`."""
    num_views: ClassVar[int] = 1
    """Augmented views of each sample that `loss` needs in a global batch (`data.views`)."""

    def __init__(self, settings: Any) -> None:
        """settings: an instance of `Settings`."""
        self.settings = settings

    def extend_model(self, model: nn.Module, arch: Architecture) -> None:
        """Add what only this objective trains: parameters and modules of `model`.

        Called once, before the engine is built, with a random state that depends on the run's
        seed alone.
        """

    def loss(self, engine: Engine, batch: Batch) -> torch.Tensor:
        """Mean loss over one micro-batch of this rank; scalar."""
        raise NotImplementedError

    def metrics(self) -> dict[str, float]:
        """Further metrics of the log interval that ends now, by full name. Collective."""
        return {}

    def pictures(self, session: Any) -> Iterable[Path]:
        """PNG files drawn after the last step, in `session.folder`. Collective; rank 0 writes."""
        return ()


def check_objective(objective: Objective, *, num_classes: int, views: int, path: str) -> None:
    """Raise UserError when the shards at `path` cannot serve the objective."""
    name = objective.settings.name
    if objective.needs_labels and num_classes == 0:
        raise UserError(
            f"{name} needs labels, but the shards of {path} have none",
            where="objective.name",
            next_step="set data.path to labelled shards, or choose an objective without labels",
        )
    if views % objective.num_views:
        raise UserError(
            f"{name} needs {objective.num_views} views of each sample, not {views}",
            where="data.views",
            allowed=f"multiples of {objective.num_views}",
            next_step=f"set data.views={objective.num_views}",
        )
