"""Attention rollout: which patches the output attends to, through all layers.

Source: Abnar and Zuidema 2020; Dosovitskiy et al. 2021, figure 6 and appendix D.8.

Shapes: B images, T tokens, R and C rows and columns of patches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from finetune.inspection.attention import attention_modules, read_attention
from finetune.inspection.subject import Inspected
from vitscale.evaluation.models.inference import InferenceModel
from vitscale.images.sheet import caption

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESIDUAL = 0.5  # weight of the identity, which stands for the residual connection
OPACITY = 0.65
MAX_SIDE = 320  # px of an image in the sheet


def missing(subject: Inspected) -> str | None:
    if subject.loaded.arch.name != "vit":
        return "only models of the family vit show their attention"
    return None


class Rollout:
    """The product of the layers' attention, later ones on the left; one [T, T] for each image."""

    def __init__(self) -> None:
        self.product_BTT: torch.Tensor | None = None

    def add(self, mean_BTT: torch.Tensor) -> None:
        """The next layer, averaged over its heads; overwritten."""
        mixed_BTT = mean_BTT.mul_(1 - RESIDUAL)
        mixed_BTT.diagonal(dim1=1, dim2=2).add_(RESIDUAL)
        mixed_BTT /= mixed_BTT.sum(dim=-1, keepdim=True)
        before = self.product_BTT
        self.product_BTT = mixed_BTT if before is None else torch.bmm(mixed_BTT, before)


@torch.no_grad()
def attention_rollout(model: InferenceModel, images_B3SS: torch.Tensor) -> torch.Tensor:
    """How much each output token draws on each input token: fp32 [B, T, T], rows of sum 1.

    images: uint8 on the model's device. Layer by layer: no other matrix is kept.
    """
    rollout = Rollout()
    num_heads = [each.num_heads for each in attention_modules(model.network)]
    sums: list[torch.Tensor] = []

    def add(layer: int, head: int, p_BTT: torch.Tensor) -> None:
        if head == 0:
            sums.append(p_BTT)
        else:
            sums[0] += p_BTT
        if head == num_heads[layer] - 1:
            rollout.add(sums.pop() / num_heads[layer])

    read_attention(model, images_B3SS, add)
    assert rollout.product_BTT is not None
    return rollout.product_BTT


def patch_weights(
    rollout_BTT: torch.Tensor, *, num_prefix_tokens: int, grid: tuple[int, int], pooled: bool
) -> torch.Tensor:
    """Weight of each patch over the largest one: [B, R, C].

    From the row of the class token, which is the first; pooled: from the mean of the patches' rows.
    """
    rows_BXT = rollout_BTT[:, num_prefix_tokens:] if pooled else rollout_BTT[:, :1]
    weights_BL = rows_BXT.mean(dim=1)[:, num_prefix_tokens:]
    return (weights_BL / weights_BL.amax(dim=1, keepdim=True)).unflatten(1, grid)


def draw(subject: Inspected) -> Figure:
    from matplotlib.figure import Figure

    arch = subject.loaded.arch
    sheet = subject.images.sheet(subject.run.num_images)
    grid, stride = subject.patch_grid
    weights_BRC = torch.cat(
        [
            patch_weights(
                attention_rollout(subject.model, some_B3SS.to(subject.device)),
                num_prefix_tokens=arch.num_prefix_tokens,
                grid=grid,
                pooled=subject.is_pooled,
            ).cpu()
            for some_B3SS in sheet.pixels_B3SS.split(subject.attention_batch)
        ]
    )
    count = len(sheet)
    figure = Figure(figsize=(count * 1.5 + 1.4, 5.3), layout="constrained")
    axes = figure.subplots(3, count, squeeze=False)
    for column, (image_3SS, weights_RC) in enumerate(
        zip(sheet.pixels_B3SS, weights_BRC, strict=True)
    ):
        # Pixels beyond the last whole patch have no weight.
        seen_3HW = image_3SS[:, : grid[0] * stride, : grid[1] * stride]
        weights_HW = F.interpolate(
            weights_RC[None, None], size=seen_3HW.shape[1:], mode="bilinear", align_corners=False
        )[0, 0].numpy()
        pixels_HW3 = seen_3HW.permute(1, 2, 0).numpy()
        skip = max(1, pixels_HW3.shape[0] // MAX_SIDE)
        pixels_HW3, weights_HW = pixels_HW3[::skip, ::skip], weights_HW[::skip, ::skip]
        grey_HW = pixels_HW3.mean(axis=2)
        axes[0, column].imshow(pixels_HW3)
        axes[0, column].set_title(
            caption(sheet.titles[column], width=14), fontsize=9, parse_math=False
        )
        axes[1, column].imshow(grey_HW, cmap="gray", vmin=0, vmax=255)
        heat = axes[1, column].imshow(weights_HW, cmap="inferno", vmin=0, vmax=1, alpha=OPACITY)
        masked_HW3 = pixels_HW3 * weights_HW[:, :, None]
        axes[2, column].imshow(masked_HW3.round().astype(np.uint8))
    for row, title in enumerate(("image", "rollout", "image × rollout")):
        axes[row, 0].set_ylabel(title, fontsize=9)
    for each in axes.flat:
        each.set_xticks([])
        each.set_yticks([])
        each.spines[:].set_visible(False)
    bar = figure.colorbar(heat, ax=axes[1, :].tolist(), shrink=0.9, pad=0.01)
    bar.set_label("weight / largest", fontsize=8)
    if bar.solids is not None:
        bar.solids.set_alpha(1)
    depth = len(attention_modules(subject.loaded.network))
    source = "the mean of all patches" if subject.is_pooled else "the class token"
    text = f"Attention rollout: what {source} draws on, through all {depth} layers"
    figure.suptitle(f"{subject.name}\n{text}", fontsize=9, parse_math=False)
    return figure
