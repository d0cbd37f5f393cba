"""The objectives of fine-tuning, with a picture of predictions at the end."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from vitscale.config.section import NamedSection, choice_of
from vitscale.training.distillation.objective import Distillation
from vitscale.training.objective import Objective
from vitscale.training.supervised import Supervised

if TYPE_CHECKING:
    from vitscale.training.loop import TrainingSession


class PredictionsDrawn(Objective):
    def pictures(self, session: TrainingSession) -> Iterable[Path]:
        from finetune.objectives.pictures import predictions_sheet

        if session.val_index is None:
            return []
        sheet = predictions_sheet(
            session.engine,
            session.val_index,
            settings=session.run.data,
            image_size=session.arch.image_size,
            folder=session.folder,
        )
        return [sheet]


class Transfer(PredictionsDrawn, Supervised):
    """Labels alone."""


class DistilledTransfer(PredictionsDrawn, Distillation):
    """DeiT's fine-tuning at a higher resolution, with the teacher."""


OBJECTIVES: dict[str, type[Objective]] = {
    "supervised": Transfer,
    "distillation": DistilledTransfer,
}

if TYPE_CHECKING:
    ObjectiveSettings = NamedSection
else:
    ObjectiveSettings = choice_of(OBJECTIVES)
