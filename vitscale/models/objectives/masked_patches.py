"""Predict corrupted patches from their output tokens: masked patch prediction of the ViT paper.

Owns: which patches are corrupted and how, the module, its targets and its loss.
Leaves out: settings (`settings`), and the objective
(`pretrain/objectives/masked_patch_prediction.py`).
Source: Dosovitskiy et al. 2021, section 4.6 and appendix B.1.2. What the paper leaves open is
decided here and listed in docs/recipes.md.

Shapes: B images, N patches, K predicted patches of each image, D width, G colour cells of a patch,
p pixels a side of a patch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from vitscale.distributed.random_numbers import stream_key, uniform_rows
from vitscale.models.objectives.patches import (
    images_of_patches,
    on_device,
    patch_pixels,
    random_orders,
)

if TYPE_CHECKING:
    from vitscale.models.objectives.settings import MaskedPatchPredictionSettings
    from vitscale.models.vit.architecture import ViTArchitecture
    from vitscale.models.vit.model import ViT

LEVELS = 8  # of each channel: 3 bits
NUM_COLORS = LEVELS**3
MASK_STD = 0.02
MASK_SHADE = 127  # in pictures


@dataclass(frozen=True, slots=True)
class Corruption:
    """What happens to the patch embeddings of each image."""

    predicted_BK: np.ndarray
    """int64, increasing: the corrupted patches."""
    sources_BN: np.ndarray
    """int64: the patch whose embedding each patch gets; its own number if it keeps its own."""
    masked_BN: np.ndarray
    """bool: the mask embedding replaces it."""

    def to(self, device: torch.device) -> dict[str, torch.Tensor]:
        """The inputs of `MaskedPatches`."""
        return {name: on_device(getattr(self, name), device) for name in self.__slots__}


def draw_corruption(
    positions_B: np.ndarray,
    *,
    num_patches: int,
    num_corrupted: int,
    mask_share: float,
    swap_share: float,
    key: int,
) -> Corruption:
    """Corrupt `num_corrupted` patches of each image: a function of `key` and its position alone.

    Of these each is independently masked with probability `mask_share`, replaced by another patch
    with `swap_share`, else kept. The other patch is a clean one of the same image: the patches are
    put into a random circle, and each may be replaced by its neighbour. So every other patch is
    equally likely, and none replaces two, which keeps the backward pass deterministic on GPUs.
    """
    draws_BN, kinds_BN, circle_BN = (
        uniform_rows(positions_B, num=3 * num_patches, key=key)
        .reshape(len(positions_B), 3, num_patches)
        .swapaxes(0, 1)
    )
    predicted_BK = np.sort(random_orders(draws_BN)[:, :num_corrupted], axis=1)
    kinds_BK = np.take_along_axis(kinds_BN, predicted_BK, axis=1)
    circle_BN = random_orders(circle_BN)
    donors_BN = np.empty_like(circle_BN)
    np.put_along_axis(donors_BN, circle_BN, np.roll(circle_BN, -1, axis=1), axis=1)
    is_masked_BK = kinds_BK < mask_share
    is_swapped_BK = ~is_masked_BK & (kinds_BK < mask_share + swap_share)
    masked_BN = np.zeros(circle_BN.shape, dtype=bool)
    np.put_along_axis(masked_BN, predicted_BK, is_masked_BK, axis=1)
    sources_BN = np.tile(np.arange(num_patches), (len(positions_B), 1))
    donors_BK = np.take_along_axis(donors_BN, predicted_BK, axis=1)
    sources_BK = np.where(is_swapped_BK, donors_BK, predicted_BK)
    np.put_along_axis(sources_BN, predicted_BK, sources_BK, axis=1)
    return Corruption(predicted_BK, sources_BN, masked_BN)


def corruption_of(
    settings: MaskedPatchPredictionSettings,
    arch: ViTArchitecture,
    *,
    positions_B: np.ndarray,
    purpose: str,
    seed: int,
) -> Corruption:
    """Corrupt the images at these positions as the settings say; each purpose has its own draws."""
    return draw_corruption(
        positions_B,
        num_patches=arch.num_patches,
        num_corrupted=settings.num_corrupted(arch),
        mask_share=settings.mask_share,
        swap_share=settings.swap_share,
        key=stream_key(purpose, seed),
    )


class MaskedPatches(nn.Module):
    """The mask embedding, and a linear head on the output tokens of corrupted patches.

    Corruption acts on patch embeddings before positions are added, as in BERT, so that a masked
    token still has its position. The head starts at zero: all colours are equally likely.
    """

    def __init__(self, width: int, num_outputs: int) -> None:
        super().__init__()
        self.mask_token = nn.Parameter(torch.empty(1, 1, width))
        self.head = nn.Linear(width, num_outputs)
        nn.init.trunc_normal_(self.mask_token, std=MASK_STD)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(
        self,
        model: ViT,
        images_B3SS: torch.Tensor,
        *,
        predicted_BK: torch.Tensor,
        sources_BN: torch.Tensor,
        masked_BN: torch.Tensor,
    ) -> torch.Tensor:
        """Predictions for the corrupted patches [B, K, outputs]."""
        clean_BND = model.patch_embed(images_B3SS)
        patches_BND = _rows(clean_BND, sources_BN)
        patches_BND = torch.where(masked_BN[..., None], self.mask_token, patches_BND)
        tokens_BLD = model.run_blocks(model.norm_pre(model._pos_embed(patches_BND)))
        patches_BND = tokens_BLD[:, model.num_prefix_tokens :]
        predictions_BKO: torch.Tensor = self.head(_rows(patches_BND, predicted_BK))
        return predictions_BKO


def _rows(values_BND: torch.Tensor, numbers_BM: torch.Tensor) -> torch.Tensor:
    """[B, N, D] -> [B, M, D]: the rows with these numbers."""
    return values_BND.gather(1, numbers_BM[..., None].expand(-1, -1, values_BND.shape[-1]))


def colors(patches_BKPP3: torch.Tensor, *, cells: int) -> torch.Tensor:
    """The mean colour of each of `cells` x `cells` parts of each patch, as a class; [B, K, G].

    patches: uint8. A channel's mean m in [0, 1] is level min(floor(8 m), 7), and the class is
    64 R + 8 G + B. Computed in integers, so that no precision or device changes a class.
    """
    side = patches_BKPP3.shape[2] // cells
    cells_BKGSGS3 = patches_BKPP3.unflatten(3, (cells, side)).unflatten(2, (cells, side))
    sums_BKGG3 = cells_BKGSGS3.sum(dim=(3, 5), dtype=torch.int64)
    levels = (LEVELS * sums_BKGG3 // (255 * side**2)).clamp(max=LEVELS - 1)
    red, green, blue = levels.flatten(2, 3).unbind(-1)
    return (red * LEVELS + green) * LEVELS + blue


def shades(colors_X: torch.Tensor) -> torch.Tensor:
    """The middle of each colour class, uint8 [X, 3]: for pictures."""
    red, rest = colors_X // LEVELS**2, colors_X % LEVELS**2
    levels_X3 = torch.stack([red, rest // LEVELS, rest % LEVELS], dim=-1)
    return ((levels_X3 * 2 + 1) * 255 // (2 * LEVELS)).to(torch.uint8)


def predicted_patches(
    images_B3SS: torch.Tensor, predicted_BK: torch.Tensor, *, patch_size: int
) -> torch.Tensor:
    """The clean pixels of the predicted patches [B, K, p, p, 3], as stored (0..255)."""
    patches_BNPP3 = patch_pixels(images_B3SS, patch_size=patch_size)
    return _rows(patches_BNPP3.flatten(2), predicted_BK).unflatten(2, patches_BNPP3.shape[2:])


def color_loss(
    predictions_BKO: torch.Tensor, colors_BKG: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean cross-entropy over cells and patches, and the share of right colours; fp32 scalars.

    With one cell and equal logits the loss is ln 512 = 6.2383, and so it is with 16.
    """
    logits = predictions_BKO.float().unflatten(-1, (-1, NUM_COLORS)).flatten(0, 2)
    targets = colors_BKG.flatten()
    right = logits.detach().argmax(dim=-1) == targets
    return F.cross_entropy(logits, targets), right.float().mean()


def pixel_loss(predictions_BKO: torch.Tensor, patches_BKPP3: torch.Tensor) -> torch.Tensor:
    """Mean squared error of pixels in [0, 1], channels last; fp32 scalar."""
    return F.mse_loss(predictions_BKO.float(), patches_BKPP3.flatten(2).float() / 255)


def picture_rows(
    images_B3SS: torch.Tensor,
    predictions_BKO: torch.Tensor,
    inputs: dict[str, torch.Tensor],
    *,
    patch_size: int,
    cells: int | None,
) -> dict[str, torch.Tensor]:
    """Title -> uint8 images: as they are, corrupted, with the targets, and with the predictions.

    inputs: of `MaskedPatches`. cells: a side of a patch; None: pixels are predicted.
    """
    grid = images_B3SS.shape[2] // patch_size, images_B3SS.shape[3] // patch_size
    patches_BNX = patch_pixels(images_B3SS, patch_size=patch_size).flatten(2)
    predicted_BK = inputs["predicted_BK"]
    seen_BNX = _rows(patches_BNX, inputs["sources_BN"])
    seen_BNX = seen_BNX.masked_fill(inputs["masked_BN"][..., None], MASK_SHADE)
    targets_BKPP3 = predicted_patches(images_B3SS, predicted_BK, patch_size=patch_size)
    if cells is None:
        guesses_BKX = predictions_BKO.float().mul(255).round().clamp(0, 255).to(torch.uint8)
        targets_BKX = targets_BKPP3.flatten(2)
    else:
        classes_BKG = predictions_BKO.unflatten(-1, (-1, NUM_COLORS)).argmax(dim=-1)
        guesses_BKX = _colored(classes_BKG, cells=cells, patch_size=patch_size)
        targets_BKX = _colored(
            colors(targets_BKPP3, cells=cells), cells=cells, patch_size=patch_size
        )
    index_BKX = predicted_BK[..., None].expand(-1, -1, patches_BNX.shape[2])
    rows = {
        "original": patches_BNX,
        "corrupted": seen_BNX,
        "targets": patches_BNX.scatter(1, index_BKX, targets_BKX),
        "predicted": patches_BNX.scatter(1, index_BKX, guesses_BKX),
    }
    shape = (patch_size, patch_size, 3)
    return {
        title: images_of_patches(row_BNX.unflatten(2, shape), grid=grid)
        for title, row_BNX in rows.items()
    }


def _colored(classes_BKG: torch.Tensor, *, cells: int, patch_size: int) -> torch.Tensor:
    """Patches [B, K, p * p * 3] whose cells have the middle colours of their classes."""
    cells_BKGG3 = shades(classes_BKG).unflatten(2, (cells, cells))
    side = patch_size // cells
    return cells_BKGG3.repeat_interleave(side, 2).repeat_interleave(side, 3).flatten(2)
