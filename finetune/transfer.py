"""The objective of fine-tuning: supervised, with a picture of predictions at the end."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from vitscale.training.supervised import Supervised

if TYPE_CHECKING:
    from vitscale.training.loop import TrainingSession


class Transfer(Supervised):
    def pictures(self, session: TrainingSession) -> Iterable[Path]:
        from finetune.pictures import predictions_sheet

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
