"""Mean attention distance of every head: how far it integrates information over the image.

Source: Dosovitskiy et al. 2021, figure 7 (right) and appendix D.7. The paper leaves the class token
open: here attention of and to prefix tokens is left out, and rows are divided by their sums.

Shapes: B images, T tokens, L patches, N layers, H heads.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from finetune.inspection.attention import attention_modules, patch_attention, read_attention
from finetune.inspection.subject import Inspected
from vitscale.evaluation.models.inference import InferenceModel

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def missing(subject: Inspected) -> str | None:
    if subject.loaded.arch.name != "vit":
        return "only models of the family vit show their attention"
    return None


def patch_distances(grid: tuple[int, int], *, stride: int) -> torch.Tensor:
    """Distances between the centres of all patches in pixels, fp32 [L, L]."""
    rows, columns = (torch.arange(each, dtype=torch.float32) * stride for each in grid)
    centres_L2 = torch.cartesian_prod(rows, columns)
    # Not by a matrix product, which loses digits of small distances.
    return torch.cdist(centres_L2, centres_L2, compute_mode="donot_use_mm_for_euclid_dist")


def mean_distance(p_BLL: torch.Tensor, distances_LL: torch.Tensor) -> torch.Tensor:
    """Mean over the queries of the distances weighted by attention, fp64 [B]."""
    return torch.einsum("bqk,qk->bq", p_BLL, distances_LL).double().mean(dim=1)


def head_distances(
    model: InferenceModel,
    batches: Iterable[torch.Tensor],
    *,
    grid: tuple[int, int],
    stride: int,
    num_prefix_tokens: int,
) -> torch.Tensor:
    """Mean distance of each head over all images, in pixels: fp64 [N, H], on the CPU.

    batches: uint8 images [B, 3, S, S] on the CPU.
    """
    modules, device = attention_modules(model.network), model.world.device
    distances_LL = patch_distances(grid, stride=stride).to(device)
    sums_NH = torch.zeros(len(modules), modules[0].num_heads, dtype=torch.float64)
    num_images = 0

    def add(layer: int, head: int, p_BTT: torch.Tensor) -> None:
        p_BLL = patch_attention(p_BTT, num_prefix_tokens=num_prefix_tokens)
        sums_NH[layer, head] += float(mean_distance(p_BLL, distances_LL).sum())

    for images_B3SS in batches:
        read_attention(model, images_B3SS.to(device), add)
        num_images += len(images_B3SS)
    return sums_NH / max(1, num_images)


def draw(subject: Inspected) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    arch, num_images = subject.loaded.arch, subject.run.num_measured_images
    grid, stride = subject.patch_grid
    batches = [0]

    def pixels() -> Iterable[torch.Tensor]:
        for batch in subject.images.spaced(num_images, batch=subject.attention_batch):
            batches[0] += len(batch)
            yield batch.pixels_B3SS

    distances_NH = head_distances(
        subject.model,
        pixels(),
        grid=grid,
        stride=stride,
        num_prefix_tokens=arch.num_prefix_tokens,
    )
    depth, num_heads = distances_NH.shape
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    axes = figure.add_subplot()
    for head in range(num_heads):
        axes.plot(range(depth), distances_NH[:, head], "o", markersize=5, alpha=0.8, zorder=2)
    uniform = float(patch_distances(grid, stride=stride).mean())
    label = f"uniform attention: {uniform:.1f} px"
    axes.axhline(uniform, color="grey", linewidth=1, linestyle=(0, (4, 3)), zorder=1, label=label)
    axes.legend(loc="lower right", frameon=False, fontsize=8)
    axes.set_ylim(0, max(1.12 * uniform, 1.05 * float(distances_NH.max())))
    axes.set_xlim(-0.5, depth - 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("Network depth (layer)")
    axes.set_ylabel("Mean attention distance (pixels)")
    axes.spines[["top", "right"]].set_visible(False)
    text = (
        f"Attention distance of {num_heads} heads, one dot each; mean over {batches[0]} images "
        f"of {arch.image_size} px"
    )
    figure.suptitle(f"{subject.name}\n{text}", fontsize=9, parse_math=False)
    return figure
