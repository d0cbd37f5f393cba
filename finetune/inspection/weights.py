"""Draw weights: principal components of the first filters, and similarity of position embeddings.

Source: Dosovitskiy et al. 2021, figure 7 (left: 28 components; centre: one tile for each row and
column of patches).

Shapes: D filters, p pixels a side, K components.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from finetune.inspection.visualized import Visualized

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROWS, COLUMNS = 4, 7
GREY = 0.5
# All tiles of a 14 x 14 grid; of a larger one fewer, since their pixels would be too small.
MAX_TILES, FEWER_TILES = 14, 8
GAP = 0.12  # of a tile, between tiles
MIN_SIDE = 24  # pixels of a tile, so that gaps can be smaller than a patch


def principal_components(
    filters_D3pp: torch.Tensor, *, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Components [K, 3, p, p] of unit norm and their shares of the variance [K], largest first.

    PCA over the D filters as points of 3 p^2 dimensions, about their mean. K is `count`, or the
    rank where that is less. The largest value of each component is positive: PCA leaves the sign
    open.
    """
    points_DX = filters_D3pp.double().flatten(1)
    _, singular_K, components_KX = torch.linalg.svd(
        points_DX - points_DX.mean(dim=0), full_matrices=False
    )
    variances_K = singular_K.square()
    noise = torch.finfo(torch.float32).eps * singular_K.max()
    count = min(count, max(1, int((singular_K > noise).sum())))
    components_KX = components_KX[:count]
    largest_K1 = components_KX.gather(
        1, components_KX.abs().argmax(dim=1, keepdim=True)
    )
    components_KX = components_KX * largest_K1.sign()
    shares_K = variances_K[:count] / variances_K.sum().clamp(
        min=torch.finfo(torch.float64).tiny
    )
    return components_KX.unflatten(1, filters_D3pp.shape[1:]), shares_K


def first_filters(network: nn.Module) -> torch.Tensor:
    """Filters of the first convolution on colours [D, 3, p, p], on the CPU."""
    first = next(
        each
        for each in network.modules()
        if isinstance(each, nn.Conv2d) and each.in_channels == 3
    )
    return first.weight.detach().cpu().double()


def draw_filters(subject: Visualized) -> Figure:
    from matplotlib.figure import Figure

    filters_D3pp = first_filters(subject.model.network)
    components_K3pp, shares_K = principal_components(filters_D3pp, count=ROWS * COLUMNS)
    figure = Figure(figsize=(6.2, 4.3), layout="constrained")
    for number, component_3pp in enumerate(components_K3pp):
        axes = figure.add_subplot(ROWS, COLUMNS, number + 1)
        shown_3pp = GREY + GREY * component_3pp / component_3pp.abs().max()
        axes.imshow(shown_3pp.permute(1, 2, 0).numpy(), interpolation="nearest")
        axes.set_axis_off()
    side = filters_D3pp.shape[-1]
    text = (
        f"{len(components_K3pp)} principal components of the {len(filters_D3pp)} first filters of "
        f"{side} × {side} px\n{100 * float(shares_K.sum()):.0f} % of the variance, largest first; "
        "grey is 0, each to its own scale"
    )
    figure.suptitle(f"{subject.name}\n{text}", fontsize=9, parse_math=False)
    return figure


# ---- positions ----------------------------------------------------------------------------------


def position_similarity(pos_LD: torch.Tensor, *, grid: tuple[int, int]) -> torch.Tensor:
    """Cosine of each patch's position with all others: [rows, columns, rows, columns], fp32.

    pos_LD: [prefix tokens + rows * columns, width]; rows of prefix tokens are left out. The first
    two dimensions choose the tile.
    """
    num_patches = grid[0] * grid[1]
    unit_LD = F.normalize(pos_LD[-num_patches:].float(), dim=1)
    return (unit_LD @ unit_LD.T).unflatten(1, grid).unflatten(0, grid)


def draw_positions(subject: Visualized) -> Figure:
    from matplotlib.figure import Figure

    grid = subject.vit.grid
    network: Any = subject.model.network
    pos_1LD: torch.Tensor = network.pos_embed  # learned, or a fixed buffer
    similarity_RCRC = position_similarity(pos_1LD[0].detach().cpu(), grid=grid)
    num_tiles = (
        grid[0] if grid[0] <= MAX_TILES else FEWER_TILES
    )  # a side; grids are square
    shown = [round(i * (grid[0] - 1) / max(1, num_tiles - 1)) for i in range(num_tiles)]
    scale = -(-MIN_SIDE // grid[0])
    side = scale * grid[0]
    gap = round(GAP * side)
    tiles = (
        similarity_RCRC[shown][:, shown]
        .repeat_interleave(scale, 2)
        .repeat_interleave(scale, 3)
    )
    tiles = F.pad(tiles, (0, gap, 0, gap), value=float("nan"))
    canvas = tiles.transpose(1, 2).flatten(2, 3).flatten(0, 1)[:-gap, :-gap]
    figure = Figure(figsize=(6.6, 5.9), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(
        canvas.numpy(), vmin=-1, vmax=1, cmap="viridis", interpolation="nearest"
    )
    centres = [i * (side + gap) + side / 2 for i in range(len(shown))]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(centres, labels=[str(number + 1) for number in shown])
        axis.set_tick_params(length=0)
    axes.set_ylabel("Input patch row")
    axes.set_xlabel("Input patch column")
    axes.spines[:].set_visible(False)
    figure.colorbar(image, ax=axes, label="Cosine similarity", shrink=0.8)
    kept = (
        "" if max(grid) <= MAX_TILES else f"; {len(shown)} × {len(shown)} of them shown"
    )
    text = f"Position embeddings of {grid[0]} × {grid[1]} patches: similarity to all others{kept}"
    figure.suptitle(f"{subject.name}\n{text}", fontsize=9, parse_math=False)
    return figure
