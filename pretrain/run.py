"""The run type of pre-training, and its objectives. Needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pretrain.objectives.dino import Dino
from pretrain.objectives.features import Features
from pretrain.objectives.lejepa import Lejepa
from pretrain.objectives.mae import Mae
from pretrain.objectives.masked_patch_prediction import MaskedPatchPrediction
from pretrain.objectives.simclr import Simclr
from vitscale.config.section import NamedSection, choice_of
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
