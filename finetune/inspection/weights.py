"""Draw weights: principal components of the first filters, and similarity of position embeddings.

Source: Dosovitskiy et al. 2021, figure 7 (left: 28 components; centre: one tile for each row and
column of patches).

Shapes: D filters, p pixels a side, K components.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import nn

from finetune.inspection.visualized import Visualized
from vitscale.evaluation.sheet import sheet, titled_figure

ROWS = 4
COLUMNS = 7
SIDE = 0.9  # inches
GREY = 0.5
# All tiles of a 14 x 14 grid; of a larger one fewer, since their pixels would be too small.
MAX_TILES = 14
FEWER_TILES = 8
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

    # Singular values that are nothing but rounding have directions without a meaning.
    noise = torch.finfo(torch.float32).eps * singular_K.max()
    rank = int((singular_K > noise).sum())
    count = min(count, max(1, rank))

    components_KX = components_KX[:count]
    largest_K1 = components_KX.gather(
        1, components_KX.abs().argmax(dim=1, keepdim=True)
    )
    components_KX = components_KX * largest_K1.sign()

    # Equal filters have no variance at all.
    variances_K = singular_K.square()
    total = variances_K.sum().clamp(min=torch.finfo(torch.float64).tiny)
    components_K3pp = components_KX.unflatten(1, filters_D3pp.shape[1:])
    return components_K3pp, variances_K[:count] / total


def first_filters(network: nn.Module) -> torch.Tensor:
    """Filters of the first convolution on colours [D, 3, p, p], on the CPU."""
    convolutions = (
        module
        for module in network.modules()
        if isinstance(module, nn.Conv2d) and module.in_channels == 3
    )
    return next(convolutions).weight.detach().cpu()


def draw_filters(subject: Visualized) -> Figure:
    filters_D3pp = first_filters(subject.model.network)
    components_K3pp, shares_K = principal_components(filters_D3pp, count=ROWS * COLUMNS)

    # Colours can be compared within a filter, but not between filters.
    cells = []
    for component_3pp in components_K3pp:
        shown_3pp = GREY + GREY * component_3pp / component_3pp.abs().max()
        cells.append(("", False, shown_3pp))
    rows = [cells[start : start + COLUMNS] for start in range(0, len(cells), COLUMNS)]

    side = filters_D3pp.shape[-1]
    text = (
        f"{len(cells)} principal components of the {len(filters_D3pp)} first filters of "
        f"{side} × {side} px\n{100 * float(shares_K.sum()):.0f} % of the variance, largest first; "
        "grey is 0, each to its own scale"
    )
    return sheet(f"{subject.name}\n{text}", rows, width=SIDE)


# ---- positions ----------------------------------------------------------------------------------


def position_similarity(pos_LD: torch.Tensor, *, grid: tuple[int, int]) -> torch.Tensor:
    """Cosine of each patch's position with all others: [rows, columns, rows, columns], fp32.

    pos_LD: [prefix tokens + rows * columns, width]; rows of prefix tokens are left out. The first
    two dimensions choose the tile.
    """
    num_patches = grid[0] * grid[1]
    # The last rows are the patches; prefix tokens have no place in the grid.
    unit_LD = F.normalize(pos_LD[-num_patches:].float(), dim=1)
    return (unit_LD @ unit_LD.T).unflatten(1, grid).unflatten(0, grid)


def draw_positions(subject: Visualized) -> Figure:
    rows, columns = subject.vit.grid
    network: Any = subject.model.network
    pos_1LD: torch.Tensor = network.pos_embed  # learned, or a fixed buffer
    similarity_RCRC = position_similarity(
        pos_1LD[0].detach().cpu(), grid=(rows, columns)
    )

    # Grids are square: one number of tiles a side, the first and the last patch among them.
    num_tiles = rows
    if rows > MAX_TILES:
        num_tiles = FEWER_TILES
    last = max(1, num_tiles - 1)
    shown = [round(number * (rows - 1) / last) for number in range(num_tiles)]

    scale = math.ceil(MIN_SIDE / rows)
    side = scale * rows
    gap = round(GAP * side)
    tiles = similarity_RCRC[shown][:, shown]
    tiles = tiles.repeat_interleave(scale, 2).repeat_interleave(scale, 3)
    tiles = F.pad(tiles, (0, gap, 0, gap), value=float("nan"))
    canvas = tiles.transpose(1, 2).flatten(2, 3).flatten(0, 1)[:-gap, :-gap]

    text = (
        f"Position embeddings of {rows} × {columns} patches: similarity to all others"
    )
    if num_tiles < rows:
        text += f"; {num_tiles} × {num_tiles} of them shown"
    figure = titled_figure(f"{subject.name}\n{text}", size=(6.6, 5.9))
    axes = figure.add_subplot()
    image = axes.imshow(
        canvas.numpy(), vmin=-1, vmax=1, cmap="viridis", interpolation="nearest"
    )
    centres = [number * (side + gap) + side / 2 for number in range(num_tiles)]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(centres, labels=[str(number + 1) for number in shown])
        axis.set_tick_params(length=0)
    axes.set_ylabel("Input patch row")
    axes.set_xlabel("Input patch column")
    axes.spines[:].set_visible(False)
    figure.colorbar(image, ax=axes, label="Cosine similarity", shrink=0.8)

    return figure
