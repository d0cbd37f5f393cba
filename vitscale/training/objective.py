"""The interface of a training objective; objectives are in `supervised` and pretrain/objectives/.

Needs no torch when imported, and neither may a file with an objective: settings are validated on
machines without torch. Import torch inside the methods; modules belong into `vitscale.models`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from vitscale.config.errors import UserError
from vitscale.config.section import NamedSection
from vitscale.evaluation.classification import ClassificationSettings
from vitscale.evaluation.evaluation import SettingsBase
from vitscale.evaluation.registry import EVALUATIONS
from vitscale.models.registry import costs_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from vitscale.data.loader import Batch
    from vitscale.distributed.world import World
    from vitscale.engine.engine import Engine
    from vitscale.engine.settings import EngineSettings
    from vitscale.models.settings import Architecture
    from vitscale.runs.training import TrainingRun


class Objective:
    """What a run optimises. A subclass names its settings and defines `loss`."""

    Settings: ClassVar[type[NamedSection]]
    needs_labels: ClassVar[bool] = True
    """Whether `loss` reads `batch.labels`."""
    trains_classifier: ClassVar[bool] = True
    """Whether `loss` trains the model's head; without, the model is built without one."""

    def __init__(self, settings: Any, *, seed: int) -> None:
        """settings: an instance of `Settings`. seed: the run's, for draws by position."""
        self.settings, self.seed = settings, seed
        self.recorded: dict[str, torch.Tensor] = {}
        """Further metrics of the last micro-batch; the log shows their means."""

    def problems(self, run: TrainingRun) -> Iterator[tuple[str, str]]:
        """Conflicts with other settings of the run, as (dotted key, what is wrong, what to do)."""
        yield from self.settings.problems()
        if self.trains_classifier:
            return
        name = self.settings.name
        if run.model.num_classes is not None:
            yield ("model.num_classes", f"{name} trains no classifier; set it to null")
        if getattr(run.model, "representation_layer", False):
            yield ("model.representation_layer", f"{name} trains no classifier; set it to false")
        if getattr(run.model, "distillation_token", False):
            what = f"{name} trains no classifier, so no distillation head either"
            yield ("model.distillation_token", f"{what}; set it to false")
        for evaluation in self.evaluations(run):
            if EVALUATIONS[evaluation.name].needs != "features":
                what = f"{evaluation.name} needs a classifier, which {name} does not train"
                yield ("evaluate", f"{what}; remove it, or take knn where there are labels")

    def evaluations(self, run: TrainingRun) -> tuple[SettingsBase, ...]:
        """The evaluations of `run`: those it names, else classification if there is a head."""
        if run.evaluate is not None:
            return run.evaluate
        return (ClassificationSettings(),) if self.trains_classifier else ()

    def prepare(self, *, num_classes: int, world: World, engine: EngineSettings) -> dict[str, Any]:
        """Load what `loss` needs besides the model; called once, before the model is built.

        Returns what a checkpoint and a resumed run must agree on because of it.
        Raises UserError when it does not fit the run.
        """
        return {}

    def extend_model(self, model: nn.Module, arch: Architecture) -> None:
        """Add what only this objective trains, as the module `model.objective`.

        Called once, before the engine is built, with a random state that depends on the run's seed
        alone. Transfer leaves out this module's tensors.
        """

    def num_parameters(self, arch: Architecture) -> int:
        """Exact count of trained values, with those that this objective adds."""
        return int(costs_of(arch).num_parameters(arch))

    def train_flops_per_image(self, arch: Architecture) -> int:
        """Model FLOPs of one training step per image, counted as `models.costs` does."""
        return int(costs_of(arch).train_flops_per_image(arch))

    def activation_bytes_per_image(
        self, arch: Architecture, *, precision: str, activation_checkpointing: bool
    ) -> int:
        """Activations kept for the backward pass of one image."""
        kept = costs_of(arch).activation_bytes_per_image(
            arch, precision=precision, activation_checkpointing=activation_checkpointing
        )
        return int(kept)

    def notes(self) -> Iterator[str]:
        """What a dry run says about the objective besides its name."""
        yield from ()

    def loss(self, engine: Engine, batch: Batch) -> torch.Tensor:
        """Mean loss over one micro-batch of this rank; scalar."""
        raise NotImplementedError

    def record(self, name: str, value: torch.Tensor) -> None:
        """Add a scalar of this micro-batch to the mean of a metric, by its full name."""
        self.recorded[name] = value

    def draw(self, session: Any) -> None:
        """Draw PNG files after the last step, in `session.folder`/pictures.

        Collective; rank 0 writes.
        """


def check_objective(objective: Objective, run: TrainingRun, *, num_classes: int) -> None:
    """Raise UserError when the shards of `run` cannot serve the objective and its evaluations."""
    name, path = objective.settings.name, run.data.path
    if objective.needs_labels and num_classes == 0:
        raise UserError(
            f"{name} needs labels, but the shards of {path} have none",
            where="objective.name",
            next_step="set data.path to labelled shards, or choose an objective without labels",
        )
    names = [evaluation.name for evaluation in objective.evaluations(run)]
    if names and num_classes == 0 and run.data.evaluated is not None:
        raise UserError(
            f"{', '.join(names)} needs labels, but the shards of {path} have none",
            where="evaluate",
            next_step="set evaluate=[], or data.path to labelled shards",
        )
