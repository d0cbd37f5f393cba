"""Predict corrupted patches from their output tokens: masked patch prediction of the ViT paper.

Owns: which patches are corrupted and how, the module, its targets and its loss. Leaves out: the
objective, whose settings need no torch (`masked_patch_prediction`).
Source: Dosovitskiy et al. 2021, section 4.6 and appendix B.1.2. What the paper leaves open is
decided here and listed in docs/recipes.md.

Shapes: B images, N patches, K predicted patches of each image, D width, C colours, p pixels a side
of a patch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from pretrain.objectives.patches import (
    random_orders,
    take_patches,
    to_images,
    to_patches,
)
from vitscale.models.vit import ViT
from vitscale.objectives.draws import uniform_rows

LEVELS = 8  # of each channel: 3 bits
NUM_COLORS = LEVELS**3
MASK_STD = 0.02
MASK_SHADE = 127  # in pictures


def draw_corruption(
    positions_B: np.ndarray,
    *,
    settings: Any,
    num_patches: int,
    key: int,
) -> dict[str, np.ndarray]:
    """Corrupt patches of each image: a function of `key` and its position alone.

    settings: of the objective.

    Each is independently masked with probability `mask_share`, replaced by another patch with
    `swap_share`, else kept. The other patch is a clean one of the same image: the patches are
    put into a random circle, and each may be replaced by its neighbour. So every other patch is
    equally likely, and none replaces two, which keeps the backward pass deterministic on GPUs.

    Returns the inputs of `MaskedPatches`: predicted_BK, int64, increasing: the corrupted patches;
    sources_BN, int64: the patch whose embedding each patch gets, its own number if it keeps its
    own; masked_BN, bool: the mask embedding replaces it.
    """
    # One row of draws for each image, so that its corruption depends on no other image.
    num_images = len(positions_B)
    draws_B3N = uniform_rows(positions_B, num=3 * num_patches, key=key).reshape(
        num_images, 3, num_patches
    )
    orders_BN = random_orders(draws_B3N[:, 0])
    circle_BN = random_orders(draws_B3N[:, 2])

    # The patches with the least first draw are corrupted; increasing numbers make gathers cheap.
    num_corrupted = settings.num_corrupted(num_patches)
    predicted_BK = np.sort(orders_BN[:, :num_corrupted], axis=1)

    # One draw decides between the three kinds: [0, mask), [mask, mask + swap), and the rest.
    kinds_BK = np.take_along_axis(draws_B3N[:, 1], predicted_BK, axis=1)
    is_masked_BK = kinds_BK < settings.mask_share
    is_corrupted_BK = kinds_BK < settings.mask_share + settings.swap_share
    is_swapped_BK = is_corrupted_BK & ~is_masked_BK

    masked_BN = np.zeros(circle_BN.shape, dtype=bool)
    np.put_along_axis(masked_BN, predicted_BK, is_masked_BK, axis=1)

    # The donor of a patch is the next one in the circle, whether that one is corrupted or not.
    donors_BN = np.empty_like(circle_BN)
    np.put_along_axis(donors_BN, circle_BN, np.roll(circle_BN, -1, axis=1), axis=1)
    donors_BK = np.take_along_axis(donors_BN, predicted_BK, axis=1)
    sources_BK = np.where(is_swapped_BK, donors_BK, predicted_BK)
    sources_BN = np.tile(np.arange(num_patches), (num_images, 1))
    np.put_along_axis(sources_BN, predicted_BK, sources_BK, axis=1)
    return {
        "predicted_BK": predicted_BK,
        "sources_BN": sources_BN,
        "masked_BN": masked_BN,
    }


class MaskedPatches(nn.Module):
    """The mask embedding, and a linear head on the output tokens of corrupted patches.

    Corruption acts on patch embeddings before positions are added, as in BERT, so that a masked
    token still has its position. The head starts at zero: all colours are equally likely.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mask_token = nn.Parameter(torch.empty(1, 1, width))
        self.head = nn.Linear(width, NUM_COLORS)
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
        """Logits of the corrupted patches' colours [B, K, C]."""
        patches_BND = take_patches(model.patch_embed(images_B3SS), sources_BN)
        patches_BND = torch.where(masked_BN[..., None], self.mask_token, patches_BND)
        tokens_BLD = model.run_blocks(model.norm_pre(model._pos_embed(patches_BND)))

        # Only corrupted patches have a loss, so the head sees no others.
        patches_BND = tokens_BLD[:, model.num_prefix_tokens :]
        logits_BKC: torch.Tensor = self.head(take_patches(patches_BND, predicted_BK))
        return logits_BKC


def colors(patches_BKX: torch.Tensor) -> torch.Tensor:
    """The mean colour of each patch as a class [B, K].

    patches: of `to_patches`, uint8. A channel's mean m in [0, 1] is level min(floor(8 m), 7), and
    the class is 64 R + 8 G + B. Computed in integers, so that no precision or device changes it.
    """
    pixels_BKQ3 = patches_BKX.unflatten(2, (-1, 3))
    num_pixels = pixels_BKQ3.shape[2]
    sums_BK3 = pixels_BKQ3.sum(dim=2, dtype=torch.int64)

    # A mean of exactly 1, a white patch, belongs to the highest level.
    levels_BK3 = LEVELS * sums_BK3 // (255 * num_pixels)
    red, green, blue = levels_BK3.clamp(max=LEVELS - 1).unbind(-1)
    return (red * LEVELS + green) * LEVELS + blue


def shades(colors_X: torch.Tensor) -> torch.Tensor:
    """The middle of each colour class, uint8 [X, 3]: for pictures."""
    # The digits of a number in base 8, in the order of `colors`.
    red = colors_X // LEVELS**2
    green = colors_X // LEVELS % LEVELS
    blue = colors_X % LEVELS
    levels_X3 = torch.stack([red, green, blue], dim=-1)
    return ((levels_X3 * 2 + 1) * 255 // (2 * LEVELS)).to(torch.uint8)


def color_loss(
    logits_BKC: torch.Tensor, colors_BK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean cross-entropy over patches, and the share of right colours; fp32 scalars.

    With equal logits the loss is ln 512 = 6.2383.
    """
    # A sum over 512 classes would lose its last digits in half precision.
    loss = F.cross_entropy(logits_BKC.float().flatten(0, 1), colors_BK.flatten())
    is_right_BK = logits_BKC.detach().argmax(dim=-1) == colors_BK
    return loss, is_right_BK.float().mean()


def picture_rows(
    images_B3SS: torch.Tensor,
    logits_BKC: torch.Tensor,
    inputs: dict[str, torch.Tensor],
    *,
    patch_size: int,
) -> dict[str, torch.Tensor]:
    """Title -> uint8 images: as they are, corrupted, with the right colours, with the predicted.

    inputs: of `MaskedPatches`.
    """
    patches_BNX = to_patches(images_B3SS, patch_size=patch_size)
    predicted_BK = inputs["predicted_BK"]
    index_BKX = predicted_BK[..., None].expand(-1, -1, patches_BNX.shape[2])

    def colored(colors_BK: torch.Tensor) -> torch.Tensor:
        shades_BKX = shades(colors_BK).repeat(1, 1, patch_size**2)
        return patches_BNX.scatter(1, index_BKX, shades_BKX)

    # The mask embedding has no pixels; it is drawn in grey.
    corrupted_BNX = take_patches(patches_BNX, inputs["sources_BN"])
    corrupted_BNX.masked_fill_(inputs["masked_BN"][..., None], MASK_SHADE)

    rows = {
        "original": patches_BNX,
        "corrupted": corrupted_BNX,
        "targets": colored(colors(take_patches(patches_BNX, predicted_BK))),
        "predicted": colored(logits_BKC.argmax(dim=-1)),
    }
    side = images_B3SS.shape[2] // patch_size
    return {
        title: to_images(row_BNX, grid=(side, side)) for title, row_BNX in rows.items()
    }
