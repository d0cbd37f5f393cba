"""The run type of fine-tuning. Needs no torch."""

from __future__ import annotations

from typing import Literal

from finetune.objectives import OBJECTIVES, ObjectiveSettings
from vitscale.objectives.objective import Objective, SupervisedSettings
from vitscale.runs.training import TrainingRun


class FinetuneRun(TrainingRun):
    """checkpoint -> model transferred to other labels and, usually, a higher resolution."""

    stage: Literal["finetune"] = "finetune"
    """`vitscale finetune` runs files of this stage."""
    objective: ObjectiveSettings = SupervisedSettings()
    """Prediction target of the training, and its loss."""

    def make_objective(self) -> Objective:
        return OBJECTIVES[self.objective.name](self.objective, seed=self.seed)
