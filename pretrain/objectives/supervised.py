"""Supervised classification, the objective of the ViT paper.

Leaves out: the losses themselves (`vitscale.training.losses`), which fine-tuning shares.
"""

from __future__ import annotations

import torch

from vitscale.data.loader import Batch
from vitscale.engine.engine import Engine
from vitscale.optim.settings import ObjectiveSettings
from vitscale.training.losses import LOSSES


def supervised_loss(engine: Engine, batch: Batch, settings: ObjectiveSettings) -> torch.Tensor:
    """Mean loss over one micro-batch of this rank; scalar."""
    logits_BC = engine.logits(batch.images)
    return LOSSES[settings.loss](
        logits_BC,
        batch.labels,
        settings.label_smoothing,
        mixed_labels_B=batch.mixed_labels,
        mix_lambda_B=batch.mix_lambda,
    )
