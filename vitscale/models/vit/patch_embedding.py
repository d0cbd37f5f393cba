"""Resize the patch embedding to patches of another size."""

from __future__ import annotations

import torch
from timm.layers.patch_embed import resample_patch_embed


def resize_patch_embedding(kernel_DCPP: torch.Tensor, *, patch_size: int) -> torch.Tensor:
    """The kernel that sees patches of `patch_size` as the given one sees its own. Returns fp32.

    kernel_DCPP: [width, channels, rows, columns]. The result is (B^T)^+ w, where B resizes a patch
    bilinearly. Upwards, tokens of resized patches are those of the patches themselves; downwards,
    no other kernel is nearer for uncorrelated pixels. Source: PI-resize of FlexiViT,
    Beyer et al. 2023.
    """
    size = [patch_size, patch_size]
    resized: torch.Tensor = resample_patch_embed(
        kernel_DCPP.float(), size, interpolation="bilinear", antialias=False
    )
    return resized
