"""Cosine similarity of position embeddings: one tile for each row and column of patches.

Source: Dosovitskiy et al. 2021, figure 7 (centre).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from finetune.inspection.subject import Inspected

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# All tiles of a 14 x 14 grid; of a larger one fewer, since their pixels would be too small.
MAX_TILES, FEWER_TILES = 14, 8
GAP = 0.12  # of a tile, between tiles
MIN_SIDE = 24  # pixels of a tile, so that gaps can be smaller than a patch


def missing(subject: Inspected) -> str | None:
    if subject.loaded.arch.name != "vit":
        return "only models of the family vit show their positions"
    return None


def position_similarity(pos_LD: torch.Tensor, *, grid: tuple[int, int]) -> torch.Tensor:
    """Cosine of each patch's position with all others: [rows, columns, rows, columns], fp32.

    pos_LD: [prefix tokens + rows * columns, width]; rows of prefix tokens are left out. The first
    two dimensions choose the tile.
    """
    num_patches = grid[0] * grid[1]
    unit_LD = F.normalize(pos_LD[-num_patches:].float(), dim=1)
    return (unit_LD @ unit_LD.T).unflatten(1, grid).unflatten(0, grid)


def tile_layout(grid: tuple[int, int]) -> tuple[int, int]:
    """Pixels a side of a patch in a tile, and between tiles."""
    scale = -(-MIN_SIDE // max(grid))
    return scale, round(GAP * scale * max(grid))


def tiled(similarity_RCRC: torch.Tensor, *, rows: list[int], columns: list[int]) -> np.ndarray:
    """The tiles of some rows and columns as one image, NaN between them."""
    scale, gap = tile_layout((similarity_RCRC.shape[2], similarity_RCRC.shape[3]))
    height, width = (scale * side for side in similarity_RCRC.shape[2:])
    high, wide = height + gap, width + gap
    canvas = np.full((len(rows) * high - gap, len(columns) * wide - gap), np.nan, np.float32)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            tile = similarity_RCRC[row, column].numpy().repeat(scale, 0).repeat(scale, 1)
            canvas[i * high : i * high + height, j * wide : j * wide + width] = tile
    return canvas


def spaced(count: int) -> list[int]:
    """All of `count` rows, or FEWER_TILES with the first and the last, evenly spaced."""
    shown = count if count <= MAX_TILES else FEWER_TILES
    return [round(i * (count - 1) / max(1, shown - 1)) for i in range(shown)]


def draw(subject: Inspected) -> Figure:
    from matplotlib.figure import Figure

    grid = subject.loaded.arch.grid
    network: Any = subject.loaded.network
    pos_1LD: torch.Tensor = network.pos_embed  # learned, or a fixed buffer
    similarity_RCRC = position_similarity(pos_1LD[0].detach().cpu(), grid=grid)
    rows, columns = spaced(grid[0]), spaced(grid[1])
    canvas = tiled(similarity_RCRC, rows=rows, columns=columns)
    figure = Figure(figsize=(6.6, 5.9), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(canvas, vmin=-1, vmax=1, cmap="viridis", interpolation="nearest")
    scale, gap = tile_layout(grid)
    for axis, shown, side in ((axes.yaxis, rows, grid[0]), (axes.xaxis, columns, grid[1])):
        centres = [i * (scale * side + gap) + scale * side / 2 for i in range(len(shown))]
        axis.set_ticks(centres, labels=[str(number + 1) for number in shown])
        axis.set_tick_params(length=0)
    axes.set_ylabel("Input patch row")
    axes.set_xlabel("Input patch column")
    axes.spines[:].set_visible(False)
    figure.colorbar(image, ax=axes, label="Cosine similarity", shrink=0.8)
    kept = "" if max(grid) <= MAX_TILES else f"; {len(rows)} × {len(columns)} of them shown"
    text = f"Position embeddings of {grid[0]} × {grid[1]} patches: similarity to all others{kept}"
    figure.suptitle(f"{subject.name}\n{text}", fontsize=9, parse_math=False)
    return figure
