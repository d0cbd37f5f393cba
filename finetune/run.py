"""The run type of fine-tuning. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from finetune.objectives import OBJECTIVES, ObjectiveSettings
from vitscale.config.errors import UserError
from vitscale.config.section import Problems
from vitscale.models.registry import ModelSettings
from vitscale.models.settings import ViTSettings
from vitscale.objectives.objective import Objective, SupervisedSettings
from vitscale.runs.training import TrainingRun

# Keys of `model` that mean the head of the training before.
OF_HEAD = {"num_classes", "head_bias", "head_std"}


class FinetuneRun(TrainingRun):
    """checkpoint -> model transferred to other labels and, usually, a higher resolution."""

    stage: Literal["finetune"] = "finetune"
    """`vitscale finetune` runs files of this stage."""
    objective: ObjectiveSettings = SupervisedSettings()
    """Prediction target of the training, and its loss."""
    model: ModelSettings = ViTSettings()
    """The model family and its size. Where neither `preset` nor all sizes are given, the model of
    `init`: its keys, and the pixels that it expects in `data`, wherever nobody sets them."""
    init: str | None = None
    """Initial weights: a run folder, a checkpoint folder, a file of weights (.npz, .safetensors,
    .pth), a folder of Hugging Face or timm, timm/NAME or hf://OWNER/NAME; see docs/weights.md.
    null: none."""
    init_weights: Literal["auto", "model", "ema"] = "auto"
    """Start from the weights themselves (model) or their average (ema). auto: the average where
    the checkpoint has one."""
    keep_head: bool | Literal["auto", "slice"] = "auto"
    """true: keep the head of `init` too, for the same classes, matched by name (DeiT at 384 px).
    slice: keep its rows of the shards' classes (EVA's 21k head for 1k labels). false: a new head.
    auto: true where both name the same classes and the head fits, else false."""
    position_embedding: Literal["auto", "google", "timm", "deit", "dinov2"] = "auto"
    """How learned position embeddings are resampled to the new grid; see docs/recipes.md. auto: as
    the library does that the weights come from."""
    init_patch: Literal["same", "resize"] = "same"
    """resize: `init` may have another patch size; its patch embedding is resized to the model's.
    Beyer et al. 2023 (FlexiViT)."""

    def implied(self) -> Iterator[tuple[str, dict[str, Any]]]:
        yield from super().implied()
        if self.init is None or self.model.is_complete:
            return
        try:
            # Imported late: torch takes seconds, and all other runs start without it.
            from vitscale.evaluation.trained_model import PIXELS, read_model
        except ModuleNotFoundError as error:
            raise UserError(
                f"to read the model of init, this machine needs {error.name}",
                where="model",
                next_step="describe the model, such as model.preset=S/16",
            ) from None
        source, _, arch = read_model(
            self.init, weights=self.init_weights, model=self.model
        )

        # The family's keys, without those that mean the classes of the training before.
        model = arch.model_dump(mode="json", exclude_unset=True, exclude=OF_HEAD)
        expected = source.preprocessing
        pixels = {key: expected[key] for key in PIXELS if key in expected}
        # Crops of the training are resized alike; they have no filter `area`.
        if pixels["eval_interpolation"] != "area":
            pixels["interpolation"] = pixels["eval_interpolation"]
        yield f"init={self.init}", {"model": model, "data": pixels}

    def starts_from(self) -> str | None:
        return self.init

    def make_objective(self) -> Objective:
        return OBJECTIVES[self.objective.name](self.objective, seed=self.seed)

    # The objective knows which models and data it can train on.
    def problems(self) -> Problems:
        yield from super().problems()
        if self.init is None and not self.model.is_complete:
            yield (
                "init",
                "null, and `model` describes no model; set init=timm/vit_small_patch16_224."
                "augreg_in21k for published weights, or model.preset=S/16 for random ones",
            )
        yield from self.make_objective().problems(self)
