"""Read the model of a run folder: its settings from config.yaml, its size from the checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from torch import nn

from vitscale.checkpoint.folders import Checkpoint
from vitscale.config.errors import UserError
from vitscale.config.section import Section
from vitscale.config.yaml_source import parse_yaml, plain_value
from vitscale.models.interface.architecture import Architecture
from vitscale.models.registry import MODELS, ModelSettings
from vitscale.models.timm_models import Pixels


class _ModelSection(Section):
    model: ModelSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedModel:
    settings: ModelSettings
    arch: Architecture
    pixels: Pixels
    """What the run trained it on."""

    def build(self) -> nn.Module:
        """The model with random weights, on the CPU."""
        family = MODELS[self.arch.name].load()
        model: nn.Module = family.build_model(self.settings, self.arch, seed=0)
        return model


def read_trained_model(checkpoint: Checkpoint) -> TrainedModel:
    """The model that a checkpoint is of.

    Raises UserError where the run's config.yaml is missing or describes another model.
    """
    path = checkpoint.folder.parent.parent / "config.yaml"
    next_step = "keep the checkpoint in its run folder, with the run's config.yaml"
    try:
        text = path.read_text()
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
        raise UserError(what, where=str(path), next_step=next_step) from None
    errors: list[UserError] = []
    root = parse_yaml(text, name=str(path), errors=errors)
    values: Any = None if root is None or errors else plain_value(root)
    described = checkpoint.description["architecture"]
    try:
        settings = _ModelSection.model_validate({"model": values["model"]}).model
        arch = settings.architecture(num_classes=described["num_classes"])
        mean, std = (tuple(map(float, values["data"][key])) for key in ("mean", "std"))
    except (KeyError, TypeError, ValueError, ValidationError) as error:
        what = f"does not describe the model of {checkpoint.folder} ({type(error).__name__})"
        raise UserError(what, where=str(path), next_step=next_step) from None
    if arch.description() != described:
        what = f"does not describe the model of {checkpoint.folder}"
        raise UserError(what, where=str(path), next_step=next_step)
    pixels = Pixels(image_size=arch.image_size, mean=mean, std=std)
    return TrainedModel(settings=settings, arch=arch, pixels=pixels)
