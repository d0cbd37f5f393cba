"""Load a trained model to apply it: a run, a checkpoint, or a weight file.

Leaves out: starting a training from it (`initial_weights`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from finetune.loading.settings import ModelRun
from finetune.loading.source import names_external_weights
from vitscale.checkpoint.folders import resolve_weights
from vitscale.config.errors import UserError
from vitscale.distributed.world import World
from vitscale.evaluation.models.inference import InferenceModel
from vitscale.evaluation.models.preprocessing import Preprocessing
from vitscale.evaluation.models.trained_model import (
    TrainedModel,
    read_trained_model,
    takes_average,
)
from vitscale.models.interface.architecture import Architecture
from vitscale.models.registry import MODELS, ModelSettings
from vitscale.models.vit.position_embedding import fixed_positions
from vitscale.models.weights.external import ExternalWeights
from vitscale.models.weights.inferred import inferred_model
from vitscale.models.weights.reading import read_external_weights
from vitscale.models.weights.transfer import transfer_weights


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A trained model and how it is used."""

    network: nn.Module
    """On the CPU in fp32, in eval mode."""
    settings: ModelSettings
    arch: Architecture
    preprocessing: Preprocessing
    classes: tuple[str, ...] | None
    """Name of each class by label; None where they are unknown or the model has no head."""
    source: str
    """Where the weights come from, in one line."""
    trained: TrainedModel | None
    """The run that trained it; None for a weight file."""
    step: int | None
    """Step of the checkpoint; None for a weight file."""
    averaged: bool = False
    """Whether the weights are the average over training."""

    @property
    def num_classes(self) -> int:
        """0: without a head."""
        return self.arch.num_classes

    def for_inference(self, world: World, *, precision: str = "auto") -> InferenceModel:
        """The model on the device of this rank."""
        is_low = precision == "bf16" or (precision == "auto" and world.device.type == "cuda")
        return InferenceModel(
            self.network,
            mean=self.preprocessing.mean,
            std=self.preprocessing.std,
            world=world,
            dtype=torch.bfloat16 if is_low else torch.float32,
        )


def load_model(run: ModelRun) -> LoadedModel:
    """The model of `run.init`, heads included, at its `image_size`.

    Raises UserError when it cannot be read, or does not fit.
    """
    if names_external_weights(run.init):
        return _from_external(run)
    checkpoint, _ = resolve_weights(run.init)
    trained = read_trained_model(checkpoint)
    if run.model is not None:
        raise UserError(
            "the run folder describes its model itself", where="model", next_step="remove `model`"
        )
    averaged = takes_average(checkpoint, run.init_weights)
    weights = checkpoint.tensors(prefix="ema." if averaged else "model.")
    settings, arch = _at_size(trained.settings, trained.arch, run)
    rows, columns = checkpoint.description["grid"]
    network = _build(settings, arch)
    if "pos_embed" in network.state_dict():
        weights |= fixed_positions(checkpoint.description["architecture"], grid=(rows, columns))
    where = str(checkpoint.folder)
    _fill(network, arch, run, weights=weights, source_grid=(rows, columns), where=where)
    return LoadedModel(
        network=network,
        settings=settings,
        arch=arch,
        preprocessing=replace(
            trained.preprocessing, image_size=arch.image_size, **run.preprocessing.chosen()
        ),
        classes=trained.classes,
        source=f"{checkpoint.folder}, step {checkpoint.step}",
        trained=trained,
        step=checkpoint.step,
        averaged=averaged,
    )


def _from_external(run: ModelRun) -> LoadedModel:
    path = Path(run.init)
    external = read_external_weights(path, grid=run.init_grid, model=run.model)
    inferred, num_classes = inferred_model(external, chosen=run.model, path=path)
    arch = inferred.architecture(num_classes=num_classes)
    settings, arch = _at_size(inferred, arch, run)
    network = _build(settings, arch)
    _fill(
        network,
        arch,
        run,
        weights=external.weights,
        source_grid=external.grid,
        where=run.init,
    )
    return LoadedModel(
        network=network,
        settings=settings,
        arch=arch,
        preprocessing=Preprocessing(
            image_size=arch.image_size, **{**external.preprocessing, **run.preprocessing.chosen()}
        ),
        classes=_fitting(external.classes, arch),
        source=f"{run.init}, {external.format}{_assumed(external, run)}",
        trained=None,
        step=None,
    )


def _fill(
    network: nn.Module,
    arch: Architecture,
    run: ModelRun,
    *,
    weights: dict[str, torch.Tensor],
    source_grid: tuple[int, int],
    where: str,
) -> None:
    """Put the weights into the model, head included."""
    transfer_weights(
        network,
        weights=weights,
        source_grid=source_grid,
        target_grid=arch.grid,
        num_prefix_tokens=arch.num_prefix_tokens,
        convention=run.position_embedding,
        where=where,
        keep_head=True,
    )


def _assumed(external: ExternalWeights, run: ModelRun) -> str:
    """What no file says and the format's usual values were taken for, in words."""
    if not external.assumed:
        return ""
    given = set() if run.model is None else run.model.model_fields_set
    values = {key: value for key, value in external.known.items() if key != "num_heads"}
    values |= external.preprocessing
    given |= run.preprocessing.chosen().keys()
    shown = ", ".join(f"{key}={value}" for key, value in values.items() if key not in given)
    return f"; assumed {shown}" if shown else ""


def _fitting(classes: tuple[str, ...] | None, arch: Architecture) -> tuple[str, ...] | None:
    return classes if classes is not None and len(classes) == arch.num_classes > 0 else None


def _at_size(
    settings: ModelSettings, arch: Architecture, run: ModelRun
) -> tuple[ModelSettings, Architecture]:
    if run.image_size is None or run.image_size == arch.image_size:
        return settings, arch
    resized = settings.model_copy(update={"image_size": run.image_size})
    problems = [text for key, text in resized.problems() if key == "model.image_size"]
    if problems:
        raise UserError(problems[0], where="image_size")
    return resized, resized.architecture(num_classes=arch.num_classes)


def _build(settings: ModelSettings, arch: Architecture) -> nn.Module:
    network: nn.Module = MODELS[arch.name].load().build_model(settings, arch, seed=0)
    return network.eval()
