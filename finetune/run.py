"""The run type of fine-tuning. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
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
    init: str | None = None
    """Initial weights: a run folder, a checkpoint folder, a file of weights (.npz, .safetensors,
    .pth), a folder of Hugging Face or timm, or hf://OWNER/NAME; see docs/weights.md. null: none."""
    init_weights: Literal["auto", "model", "ema"] = "auto"
    """Start from the weights themselves (model) or their average (ema). auto: the average where
    the checkpoint has one."""
    keep_head: bool | Literal["slice"] = False
    """true: keep the head of `init` too, for the same classes, matched by name (DeiT at 384 px).
    slice: keep its rows of the shards' classes (EVA's 21k head for 1k labels)."""
    position_embedding: Literal["auto", "google", "timm", "deit", "dinov2"] = "auto"
    """How learned position embeddings are resampled to the new grid; see docs/recipes.md. auto: as
    the library does that the weights come from."""
    init_patch: Literal["same", "resize"] = "same"
    """resize: `init` may have another patch size; its patch embedding is resized to the model's.
    Beyer et al. 2023 (FlexiViT)."""

    def starts_from(self) -> str | None:
        return self.init

    def make_objective(self) -> Objective:
        return OBJECTIVES[self.objective.name](self.objective, seed=self.seed)

    # The objective knows which models and data it can train on.
    def problems(self) -> Iterator[tuple[str, str]]:
        yield from super().problems()
        yield from self.make_objective().problems(self)
