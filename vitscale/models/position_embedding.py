"""Position embeddings on another patch grid.

Owns: the resampling conventions of the code bases whose numbers people compare with.
Leaves out: which tensor of a checkpoint this is (`transfer`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

# L prefix tokens + patches, D width, R rows, C columns


def _google(x_1DRC: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    return F.interpolate(x_1DRC, size=size, mode="bilinear", align_corners=True)


def _timm(x_1DRC: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    return F.interpolate(x_1DRC, size=size, mode="bicubic", antialias=True, align_corners=False)


def _deit(x_1DRC: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    return F.interpolate(x_1DRC, size=size, mode="bicubic", align_corners=False)


# google: scipy.ndimage.zoom(order=1) of vision_transformer and big_vision = align-corners bilinear.
# timm: bicubic with antialiasing, half-pixel centres. deit (and MAE): without antialiasing.
CONVENTIONS: dict[str, Callable[[torch.Tensor, tuple[int, int]], torch.Tensor]] = {
    "google": _google,
    "timm": _timm,
    "deit": _deit,
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
    if convention not in CONVENTIONS:
        raise ValueError(f"{convention!r} is not one of {sorted(CONVENTIONS)}")
    pos_LD = pos_LD.float()
    # Equal token counts are not equal grids (14 x 14 and 7 x 28), so the grids decide.
    if source_grid == target_grid:
        return pos_LD.clone()
    prefix_LD, grid_LD = pos_LD[:num_prefix_tokens], pos_LD[num_prefix_tokens:]
    grid_1DRC = grid_LD.reshape(1, rows, columns, -1).permute(0, 3, 1, 2)
    resized_1DRC = CONVENTIONS[convention](grid_1DRC, target_grid)
    resized_LD = resized_1DRC.permute(0, 2, 3, 1).flatten(0, 2)
    return torch.cat([prefix_LD, resized_LD])
