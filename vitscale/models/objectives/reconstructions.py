"""Draw what a masked model predicts: the rows of a sheet, in training and from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from vitscale.config.section import NamedSection
from vitscale.models.objectives import mae, masked_patches
from vitscale.models.objectives.settings import (
    CELLS,
    MaeSettings,
    MaskedPatchPredictionSettings,
)
from vitscale.models.vit.architecture import ViTArchitecture

Color = tuple[float, float, float]


class Predictor(Protocol):
    """A model with an objective's module: `Engine` in training, `InferenceModel` outside."""

    def normalized(self, images_B3SS: torch.Tensor, /) -> torch.Tensor: ...

    def forward(self, images_B3SS: torch.Tensor, output: str, **inputs: Any) -> Any: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Reconstruction:
    """How the predictions of one objective are drawn."""

    Settings: type[NamedSection]
    build: Callable[[Any, ViTArchitecture], nn.Module]
    """(settings, architecture) -> the module that the objective adds to the model."""
    rows: Callable[..., dict[str, torch.Tensor]]
    """Title -> uint8 images [B, 3, S, S]; takes the arguments of `reconstruction_rows`."""


def _build_mae(settings: MaeSettings, arch: ViTArchitecture) -> nn.Module:
    return mae.MaskedAutoencoder(arch, settings.decoder)


def _mae_rows(
    model: Predictor,
    images_B3SS: torch.Tensor,
    *,
    settings: MaeSettings,
    arch: ViTArchitecture,
    seed: int,
    mean: Color,
    std: Color,
) -> dict[str, torch.Tensor]:
    predicted_BLP, patches_BLP, removed_BR = mae.reconstruct(
        model,
        images_B3SS,
        mask_ratio=settings.mask_ratio,
        patch_size=arch.patch_size,
        positions=np.arange(len(images_B3SS)),
        seed=seed,
    )
    return mae.picture_rows(
        predicted_BLP,
        patches_BLP,
        removed_BR=removed_BR,
        grid=arch.grid,
        normalized=settings.normalized_pixels,
        mean=mean,
        std=std,
    )


def _build_masked_patches(
    settings: MaskedPatchPredictionSettings, arch: ViTArchitecture
) -> nn.Module:
    return masked_patches.MaskedPatches(arch.width, settings.num_outputs(arch))


def _masked_patch_rows(
    model: Predictor,
    images_B3SS: torch.Tensor,
    *,
    settings: MaskedPatchPredictionSettings,
    arch: ViTArchitecture,
    seed: int,
    mean: Color,
    std: Color,
) -> dict[str, torch.Tensor]:
    positions_B = np.arange(len(images_B3SS))
    drawn = masked_patches.corruption_of(
        settings, arch, positions_B=positions_B, purpose="pictures", seed=seed
    )
    inputs = drawn.to(images_B3SS.device)
    return masked_patches.picture_rows(
        images_B3SS,
        model.forward(images_B3SS, "objective", **inputs),
        inputs,
        patch_size=arch.patch_size,
        cells=CELLS.get(settings.target),
    )


RECONSTRUCTIONS: dict[str, Reconstruction] = {
    "mae": Reconstruction(Settings=MaeSettings, build=_build_mae, rows=_mae_rows),
    "masked_patch_prediction": Reconstruction(
        Settings=MaskedPatchPredictionSettings,
        build=_build_masked_patches,
        rows=_masked_patch_rows,
    ),
}
"""By the name of the objective."""


@torch.no_grad()
def reconstruction_rows(
    model: Predictor,
    images_B3SS: torch.Tensor,
    *,
    settings: NamedSection,
    arch: ViTArchitecture,
    seed: int,
    mean: Color,
    std: Color,
) -> Mapping[str, torch.Tensor]:
    """Title -> uint8 images [B, 3, S, S]: what the model sees, and what it predicts.

    images: uint8 on the model's device. settings: of an objective in RECONSTRUCTIONS. Which patches
    are hidden depends on the seed and the row of an image alone. Collective where the model is
    sharded.
    """
    rows = RECONSTRUCTIONS[settings.name].rows
    return rows(model, images_B3SS, settings=settings, arch=arch, seed=seed, mean=mean, std=std)
