"""Read the model of a run folder: its settings from config.yaml, its size from the checkpoint."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import distributed as dist
from torch import nn

from vitscale.checkpoint.folders import Checkpoint
from vitscale.config.errors import UserError
from vitscale.config.section import Section
from vitscale.config.source import read_yaml
from vitscale.evaluation.models.preprocessing import Preprocessing
from vitscale.models.interface.architecture import Architecture
from vitscale.models.registry import MODELS, ModelSettings
from vitscale.optim.settings import EmaSettings

# Names of the classes by label, in a run folder; the session writes it.
CLASSES_NAME = "classes.json"


class _ModelSection(Section):
    model: ModelSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedModel:
    settings: ModelSettings
    arch: Architecture
    preprocessing: Preprocessing
    """What the run evaluated it on."""
    config: Mapping[str, Any]
    """The run's config.yaml as plain values."""
    run_folder: Path
    description: Mapping[str, Any]
    """What the checkpoint says of itself: architecture, data fingerprint, label map."""
    classes: tuple[str, ...] | None
    """Name of each class by label; None where the run folder has none or the model no head."""

    def build(self) -> nn.Module:
        """The model with random weights, on the CPU."""
        family = MODELS[self.arch.name].load()
        model: nn.Module = family.build_model(self.settings, self.arch, seed=0)
        return model


def read_trained_model(checkpoint: Checkpoint) -> TrainedModel:
    """The model that a checkpoint is of, at the image size of its last step.

    Raises UserError where the run's config.yaml is missing or describes another model.
    """
    folder = checkpoint.folder.parent.parent
    path = folder / "config.yaml"
    next_step = "keep the checkpoint in its run folder, with the run's config.yaml"
    try:
        text = path.read_text()
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
        raise UserError(what, where=str(path), next_step=next_step) from None
    described = checkpoint.description["architecture"]
    try:
        values: Any = read_yaml(text, name=str(path))
        settings = _ModelSection.model_validate({"model": values["model"]}).model
        settings = settings.model_copy(update={"image_size": described["image_size"]})
        arch = settings.architecture(num_classes=described["num_classes"])
        preprocessing = Preprocessing.of_run(values["data"], image_size=arch.image_size)
    except (KeyError, TypeError, ValueError, ValidationError) as error:
        what = f"does not describe the model of {checkpoint.folder} ({type(error).__name__})"
        raise UserError(what, where=str(path), next_step=next_step) from None
    if arch.description() != described:
        what = f"does not describe the model of {checkpoint.folder}"
        raise UserError(what, where=str(path), next_step=next_step)
    return TrainedModel(
        settings=settings,
        arch=arch,
        preprocessing=preprocessing,
        config=values,
        run_folder=folder,
        description=checkpoint.description,
        classes=_class_names(folder, num_classes=arch.num_classes),
    )


def takes_average(checkpoint: Checkpoint, choice: str) -> bool:
    """Whether the averaged weights are taken; otherwise the raw ones. choice: model, ema or auto.

    auto takes an average that was saved, unless more than 1 % of it is the random start; then the
    first rank says so. Raises UserError if `ema` is chosen and no average was saved.
    """
    has_average = checkpoint.description.get("ema") is not None
    if choice == "ema" and not has_average:
        raise UserError(
            "this checkpoint holds no average of the weights",
            where=str(checkpoint.folder),
            allowed="init_weights: auto, model",
            next_step="set init_weights=auto, or train with optim.ema",
        )
    if choice == "auto" and has_average and (share := _share_of_first_weights(checkpoint)) > 0.01:
        if not dist.is_initialized() or dist.get_rank() == 0:
            # stderr: predictions may go to stdout.
            print(
                f"{checkpoint.folder}: taking the raw weights, since {share:.0%} of their average "
                "is the random start (optim.ema)",
                file=sys.stderr,
            )
        return False
    return has_average and choice != "model"


def starting_weights(checkpoint: Checkpoint, choice: str) -> dict[str, torch.Tensor]:
    """Read the raw or averaged weights of a checkpoint, as `takes_average` decides."""
    return checkpoint.tensors(prefix="ema." if takes_average(checkpoint, choice) else "model.")


def _share_of_first_weights(checkpoint: Checkpoint) -> float:
    """Share of the average that is still the weights before the first step."""
    ema = EmaSettings.model_validate(checkpoint.description["ema"])
    kept = map(ema.decay_at, range(1, checkpoint.progress["engine"]["num_averaged"] + 1))
    return math.prod(kept)


def _class_names(folder: Path, *, num_classes: int) -> tuple[str, ...] | None:
    if num_classes == 0:
        return None
    try:
        names = json.loads((folder / CLASSES_NAME).read_text())
    except (OSError, ValueError):
        names = None
    if isinstance(names, list) and len(names) == num_classes:
        return tuple(map(str, names))
    return None
