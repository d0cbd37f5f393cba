"""The run type of pre-training, and its objectives. Needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import PositiveInt

from pretrain.objectives.dino import Dino
from pretrain.objectives.features import GRID_OF_TARGETS, Features, FeaturesSettings
from pretrain.objectives.lejepa import Lejepa
from pretrain.objectives.mae import Mae
from pretrain.objectives.masked_patch_prediction import MaskedPatchPrediction
from pretrain.objectives.simclr import Simclr
from vitscale.config.section import NamedSection, Problems, choice_of
from vitscale.data.targets import Precision, target_problems
from vitscale.objectives.objective import (
    Distillation,
    Objective,
    Supervised,
    SupervisedSettings,
)
from vitscale.runs.training import TrainingRun

# A new objective is one file in `objectives` and one line here.
OBJECTIVES: dict[str, type[Objective]] = {
    "masked_patch_prediction": MaskedPatchPrediction,
    "supervised": Supervised,
    "mae": Mae,
    "simclr": Simclr,
    "lejepa": Lejepa,
    "dino": Dino,
    "features": Features,
    "distillation": Distillation,
}

# mypy cannot follow a type that is built from a dict.
if TYPE_CHECKING:
    ObjectiveSettings = NamedSection
else:
    ObjectiveSettings = choice_of(OBJECTIVES, default="supervised")


class PretrainRun(TrainingRun):
    """shards -> checkpoint."""

    stage: Literal["pretrain"] = "pretrain"
    """`vitscale pretrain` runs files of this stage."""
    objective: ObjectiveSettings = SupervisedSettings()
    """Prediction target of the training, and its loss."""

    def make_objective(self) -> Objective:
        objective = OBJECTIVES[self.objective.name]
        return objective(self.objective, seed=self.seed, views=self.data.views)


class TargetsRun(PretrainRun):
    """shards and a configuration with teachers -> what these say of the images."""

    stage: Literal["targets"] = "targets"  # type: ignore[assignment]  # another stage
    """`vitscale prepare targets` gives it to the configuration of a training."""
    output: str
    """Folder of the targets, which a training reads by `objective.targets`."""
    views: PositiveInt = 8
    """Epochs of a training until it sees the same crops again."""
    precision: Precision = "bf16"
    """How numbers are stored; int8: each vector with a scale of its own."""

    def problems(self) -> Problems:
        yield from super().problems()
        yield from target_problems(self.data)
        objective = self.objective
        if not isinstance(objective, FeaturesSettings) or not objective.teachers:
            yield (
                "objective",
                f"{objective.name} has no teachers; set name=features, and teachers",
            )
        elif objective.lacks_grid:
            yield "objective.patch_grid", GRID_OF_TARGETS
