"""The run type of pre-training. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pretrain.objectives.registry import OBJECTIVES, ObjectiveSettings
from vitscale.runs.training import TrainingRun
from vitscale.training.objective import Objective
from vitscale.training.supervised import SupervisedSettings


class PretrainRun(TrainingRun):
    """shards -> checkpoint."""

    stage: Literal["pretrain"] = "pretrain"
    """Which script runs this file: pretrain/main.py."""
    objective: ObjectiveSettings = SupervisedSettings()
    """What the model is trained to predict, and its loss."""

    def make_objective(self) -> Objective:
        return OBJECTIVES[self.objective.name](self.objective, seed=self.seed)

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from super().problems()
        yield from self.make_objective().problems(self)
