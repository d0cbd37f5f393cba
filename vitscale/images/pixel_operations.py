"""Colour and geometry operations on one uint8 image [3, H, W]; deterministic.

Results equal Pillow's on an RGB image, level by level. Each returns a new tensor. Operations on
single values are tables of 256 bytes or bit arithmetic. Resampling and blur call Pillow; merging
and splitting channels is a fifth of their cost.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from PIL import Image, ImageFilter

Interpolation = Literal["nearest", "bilinear", "bicubic"]
Colour = tuple[int, int, int]
Matrix = tuple[float, float, float, float, float, float]

_LEVELS = np.arange(256)
_RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}

# H height, W width


def map_levels(image_3HW: torch.Tensor, *tables: np.ndarray) -> torch.Tensor:
    """Replace every value by its entry in a table of 256; one table, or one per channel."""
    codes = [table.astype(np.uint8).tobytes() for table in tables]
    mapped = bytearray()
    for channel, plane_HW in enumerate(image_3HW.contiguous().numpy()):
        mapped += bytearray(plane_HW).translate(codes[channel % len(codes)])
    return torch.frombuffer(mapped, dtype=torch.uint8).view(image_3HW.shape)


def invert(image_3HW: torch.Tensor) -> torch.Tensor:
    return ~image_3HW


def solarize(image_3HW: torch.Tensor, *, threshold: int) -> torch.Tensor:
    """Invert values at or above `threshold`; 256 changes nothing."""
    if threshold > 255:
        return image_3HW.clone()
    return image_3HW ^ torch.ge(image_3HW, threshold).view(torch.uint8).neg_()


def solarize_add(image_3HW: torch.Tensor, *, addition: int, threshold: int = 128) -> torch.Tensor:
    """Brighten values below `threshold`."""
    added = np.minimum(_LEVELS + addition, 255)
    return map_levels(image_3HW, np.where(_LEVELS < threshold, added, _LEVELS))


def posterize(image_3HW: torch.Tensor, *, bits: int) -> torch.Tensor:
    """Keep the highest `bits` of 8."""
    return image_3HW & (256 - (1 << (8 - bits)))


def auto_contrast(image_3HW: torch.Tensor) -> torch.Tensor:
    """Stretch each channel to 0..255."""
    tables = []
    for plane_HW in image_3HW:
        low, high = (int(value) for value in plane_HW.aminmax())
        if low == high:
            tables.append(_LEVELS)
        else:
            scale = 255.0 / (high - low)
            tables.append((_LEVELS * scale - low * scale).clip(0, 255))
    return map_levels(image_3HW, *tables)


def equalize(image_3HW: torch.Tensor) -> torch.Tensor:
    """Flatten each channel's histogram, by Pillow's integer rule."""
    tables = []
    for plane_HW in image_3HW:
        counts = torch.bincount(plane_HW.flatten(), minlength=256).numpy()
        step = (counts.sum() - counts[counts.nonzero()[0][-1]]) // 255
        if step == 0:
            tables.append(_LEVELS)
        else:
            before = np.cumsum(counts) - counts
            tables.append(((before + step // 2) // step).clip(0, 255))
    return map_levels(image_3HW, *tables)


def grayscale(image_3HW: torch.Tensor) -> torch.Tensor:
    """ITU-R 601 luma in Pillow's 16-bit fixed point, uint8 [1, H, W]."""
    r_HW, g_HW, b_HW = image_3HW.int()
    luma_HW = (r_HW * 19595).add_(g_HW, alpha=38470).add_(b_HW, alpha=7471).add_(0x8000)
    return luma_HW.bitwise_right_shift_(16).byte()[None]


def brightness(image_3HW: torch.Tensor, *, factor: float) -> torch.Tensor:
    """Blend with black: 0 is black, 1 changes nothing."""
    return map_levels(image_3HW, _blend_table(0.0, factor))


def contrast(image_3HW: torch.Tensor, *, factor: float, gray: float | None = None) -> torch.Tensor:
    """Blend with one gray level: the rounded mean luma, or `gray`."""
    if gray is None:
        gray = math.floor(float(grayscale(image_3HW).double().mean()) + 0.5)
    return map_levels(image_3HW, _blend_table(gray, factor))


def saturation(image_3HW: torch.Tensor, *, factor: float) -> torch.Tensor:
    """Blend with the luma: 0 is gray, 1 changes nothing."""
    return _blend(grayscale(image_3HW), image_3HW, factor)


def sharpness(image_3HW: torch.Tensor, *, factor: float) -> torch.Tensor:
    """Blend with a smoothed image: 0 is smooth, 1 changes nothing. The border is not changed."""
    if min(image_3HW.shape[1:]) < 3:
        return image_3HW.clone()
    x = image_3HW.short()
    rows = (x[:, :-2] + x[:, 1:-1]).add_(x[:, 2:])
    sums = (rows[:, :, :-2] + rows[:, :, 1:-1]).add_(rows[:, :, 2:])
    sums.add_(x[:, 1:-1, 1:-1], alpha=4)
    smooth_3HW = image_3HW.clone()
    smooth_3HW[:, 1:-1, 1:-1] = sums.float().mul_(1 / 13).add_(0.5).byte()
    return _blend(smooth_3HW, image_3HW, factor)


def gaussian_blur(image_3HW: torch.Tensor, *, sigma: float) -> torch.Tensor:
    """Pillow's blur (three box filters), as the recipes use it."""
    return _from_rgb(_to_rgb(image_3HW).filter(ImageFilter.GaussianBlur(sigma)))


def affine(
    image_3HW: torch.Tensor,
    matrix: Matrix,
    *,
    interpolation: Interpolation,
    fill: Colour = (128, 128, 128),
) -> torch.Tensor:
    """Resample at (a x + b y + c, d x + e y + f), pixel centres at halves; `fill` outside."""
    image = _to_rgb(image_3HW)
    resample, method = _RESAMPLING[interpolation], Image.Transform.AFFINE
    return _from_rgb(image.transform(image.size, method, matrix, resample, fillcolor=fill))


def _to_rgb(image_3HW: torch.Tensor) -> Image.Image:
    _, height, width = image_3HW.shape
    planes = [
        Image.frombuffer("L", (width, height), plane_HW, "raw", "L", 0, 1)
        for plane_HW in image_3HW.contiguous().numpy()
    ]
    return Image.merge("RGB", planes)


def _from_rgb(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.stack([np.asarray(plane) for plane in image.split()]))


def _blend_table(gray: float, factor: float) -> np.ndarray:
    """`_blend` of every level with one gray."""
    ramp = _LEVELS.astype(np.float32)
    low = np.float32(gray)
    return (low + np.float32(factor) * (ramp - low)).clip(0, 255)


def _blend(from_1or3HW: torch.Tensor, to_3HW: torch.Tensor, factor: float) -> torch.Tensor:
    """0 gives the first, 1 the second, above 1 extrapolates; truncates as Pillow does."""
    low, mixed = from_1or3HW.float(), to_3HW.float()
    # In place: page faults of a new tensor would cost more than the arithmetic.
    return mixed.sub_(low).mul_(factor).add_(low).clamp_(0, 255).byte()
