"""Fixed position embeddings, and learned ones on another grid, resampled as each code base does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

DINOV2_OFFSET = 0.1

# L prefix tokens + patches, D width, R rows, C columns


def _dinov2(x_1DRC: torch.Tensor, *, size: tuple[int, int]) -> torch.Tensor:
    rows, columns = size
    factors = [
        (rows + DINOV2_OFFSET) / x_1DRC.shape[2],
        (columns + DINOV2_OFFSET) / x_1DRC.shape[3],
    ]
    return F.interpolate(
        x_1DRC, scale_factor=factors, mode="bicubic", align_corners=False
    )


# google: scipy.ndimage.zoom(order=1) of vision_transformer and big_vision = align-corners bilinear.
# timm: bicubic with antialiasing, half-pixel centres. deit (and MAE): without antialiasing.
# dinov2: as deit, but the factor of the resize is (n + 0.1) / M for n of M patches, which moves
# every centre towards the start (`interpolate_pos_encoding` of facebookresearch/dinov2). Its models
# with registers have neither offset nor aliasing: that is timm's.
CONVENTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "google": partial(F.interpolate, mode="bilinear", align_corners=True),
    "timm": partial(F.interpolate, mode="bicubic", antialias=True),
    "deit": partial(F.interpolate, mode="bicubic"),
    "dinov2": _dinov2,
}


def resize_position_embedding(
    pos_LD: torch.Tensor,
    *,
    source_grid: tuple[int, int],
    target_grid: tuple[int, int],
    num_prefix_tokens: int,
    convention: str,
) -> torch.Tensor:
    """Resample learned position embeddings to another patch grid.

    pos_LD: [num_prefix_tokens + rows * columns, width]; prefix rows are returned unchanged.
    Grids are (rows, columns) and need not be square. Returns fp32.
    Raises ValueError if source_grid does not account for L. Source: Dosovitskiy et al. 2021,
    sec. 3.2.
    """
    rows, columns = source_grid
    if pos_LD.ndim != 2 or pos_LD.shape[0] != num_prefix_tokens + rows * columns:
        raise ValueError(
            f"position embedding of shape {tuple(pos_LD.shape)} does not hold {num_prefix_tokens} "
            f"prefix tokens and a {rows} x {columns} grid"
        )
    pos_LD = pos_LD.float()

    # Equal token counts are not equal grids (14 x 14 and 7 x 28), so the grids decide.
    if source_grid == target_grid:
        return pos_LD.clone()

    prefix_LD = pos_LD[:num_prefix_tokens]
    grid_LD = pos_LD[num_prefix_tokens:]
    grid_1DRC = grid_LD.reshape(1, rows, columns, -1).permute(0, 3, 1, 2)
    resized_1DRC = CONVENTIONS[convention](grid_1DRC, size=target_grid)
    resized_LD = resized_1DRC.permute(0, 2, 3, 1).flatten(0, 2)
    return torch.cat([prefix_LD, resized_LD])


def sincos_position_embedding(grid: tuple[int, int], *, width: int) -> torch.Tensor:
    """Fixed 2-D positions [rows * columns, width] in fp32: sin x, cos x, sin y, cos y.

    The width / 4 frequencies run from 1 to 1 / 10,000 with both ends included; timm's
    `build_sincos2d_pos_embed` stops short of the end and puts y first. Another grid has its own
    table: nothing is resampled. Source: big_vision, posemb_sincos_2d; Beyer et al. 2022.
    """
    assert width >= 8
    return _sincos_table(grid, width=width, num_steps=width // 4 - 1)


def mae_position_embedding(grid: tuple[int, int], *, width: int) -> torch.Tensor:
    """The same as MAE has them: the frequencies stop short of 1 / 10,000.

    The two are not interchangeable. The class token's position is zero, so there is no row for it.
    Source: facebookresearch/mae, util/pos_embed.py.
    """
    return _sincos_table(grid, width=width, num_steps=width // 4)


# Values of `model.positions` that are computed from the grid.
FIXED_POSITIONS: dict[str, Callable[..., torch.Tensor]] = {
    "sincos2d": sincos_position_embedding,
    "sincos2d_mae": mae_position_embedding,
}


def fixed_positions(
    architecture: Mapping[str, Any], *, grid: tuple[int, int]
) -> dict[str, torch.Tensor]:
    """Positions that a checkpoint leaves out, since they are computed, by their name.

    architecture: a description, as in the checkpoint. Empty where positions are learned.
    """
    table = FIXED_POSITIONS.get(architecture.get("positions", "learned"))
    if table is None:
        return {}
    return {"pos_embed": table(grid, width=architecture["width"])[None]}


def _sincos_table(grid: tuple[int, int], *, width: int, num_steps: int) -> torch.Tensor:
    assert width % 4 == 0
    # Both code bases compute them with NumPy, in fp64.
    omega = 10_000.0 ** -(torch.arange(width // 4, dtype=torch.float64) / num_steps)
    rows = torch.arange(grid[0], dtype=torch.float64)
    columns = torch.arange(grid[1], dtype=torch.float64)
    y, x = torch.cartesian_prod(rows, columns).T
    x_LD = x[:, None] * omega
    y_LD = y[:, None] * omega
    return torch.cat([x_LD.sin(), x_LD.cos(), y_LD.sin(), y_LD.cos()], dim=1).float()
