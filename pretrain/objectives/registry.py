"""The objectives of pre-training. A new one is one file and one line here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pretrain.objectives.mae import Mae
from pretrain.objectives.masked_patch_prediction import MaskedPatchPrediction
from vitscale.config.section import NamedSection, choice_of
from vitscale.training.distillation.objective import Distillation
from vitscale.training.objective import Objective
from vitscale.training.supervised import Supervised

OBJECTIVES: dict[str, type[Objective]] = {
    "masked_patch_prediction": MaskedPatchPrediction,
    "supervised": Supervised,
    "mae": Mae,
    "distillation": Distillation,
}

if TYPE_CHECKING:
    ObjectiveSettings = NamedSection
else:
    ObjectiveSettings = choice_of(OBJECTIVES)
