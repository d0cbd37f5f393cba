"""The patch embedding for patches of another size, and as a matrix product."""

from __future__ import annotations

import torch
from timm.layers.patch_embed import PatchEmbed, resample_patch_embed
from torch import nn


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


class PatchProduct(nn.Conv2d):
    """A convolution of patches that do not overlap, as one matrix product of the flat patches.

    The same parameters under the same names; sums are rounded in another order.
    """

    def forward(self, images_BCSS: torch.Tensor) -> torch.Tensor:
        """Images [B, C, S, S] -> [B, width, rows, columns]; the rest of an image is left out."""
        patch_rows, patch_columns = self.kernel_size
        rows, columns = (
            side // patch
            for side, patch in zip(images_BCSS.shape[2:], self.kernel_size, strict=True)
        )
        whole_BCSS = images_BCSS[:, :, : rows * patch_rows, : columns * patch_columns]
        split_BCRPSP = whole_BCSS.unflatten(3, (columns, patch_columns)).unflatten(
            2, (rows, patch_rows)
        )
        flat_BRSX = split_BCRPSP.permute(0, 2, 4, 1, 3, 5).flatten(3)
        tokens_BRSD = nn.functional.linear(flat_BRSX, self.weight.flatten(1), self.bias)
        return tokens_BRSD.permute(0, 3, 1, 2)


def multiply_patches(model: nn.Module) -> None:
    """Compute the patch embeddings of a model as matrix products; its parameters stay its own."""
    for module in model.modules():
        if isinstance(module, PatchEmbed):
            kernel, size = module.proj, module.patch_size
            product = PatchProduct(
                kernel.in_channels, kernel.out_channels, size, stride=size, device="meta"
            )
            product.weight, product.bias = kernel.weight, kernel.bias
            module.proj = product
