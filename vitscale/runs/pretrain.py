"""The run type of pre-training."""

from __future__ import annotations

from typing import Literal

from vitscale.runs.training import TrainingRun


class PretrainRun(TrainingRun):
    """shards -> checkpoint."""

    stage: Literal["pretrain"] = "pretrain"
