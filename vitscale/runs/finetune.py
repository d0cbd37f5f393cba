"""The run type of fine-tuning."""

from __future__ import annotations

from typing import Literal

from vitscale.runs.training import TrainingRun


class FinetuneRun(TrainingRun):
    """checkpoint -> model transferred to other labels and, usually, a higher resolution."""

    stage: Literal["finetune"] = "finetune"
    init: str | None = None
    """Run folder, checkpoint folder or .safetensors file to start from; null: random weights."""
    position_embedding: Literal["google", "timm", "deit"] = "google"
    """How learned position embeddings are resampled to the new grid; see docs/recipes.md."""
