"""The masked autoencoder: what MAE adds to a Vision Transformer, and its targets.

Source: He et al. 2022 (Masked Autoencoders Are Scalable Vision Learners); models_mae.py of
facebookresearch/mae. B batch, L patches, K kept and R removed patches, D width of the encoder,
W width of the decoder, P values of a patch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from pretrain.objectives.patches import take_patches, to_images
from vitscale.models.positions import mae_position_embedding
from vitscale.models.settings import ViTSettings
from vitscale.models.vit import Block, ViT, run_blocks

TOKEN_STD = 0.02
VARIANCE_EPS = 1e-6


class MaskedAutoencoder(nn.Module):
    """Encodes the kept patches only and predicts the pixels of all, from a narrow decoder."""

    pos_embed: torch.Tensor

    def __init__(
        self, arch: ViTSettings, *, width: int, depth: int, num_heads: int
    ) -> None:
        """Start from torch's random state: Xavier-uniform, biases 0, mask token N(0, 0.02).

        width, depth, num_heads: of the decoder; its MLPs are four times as wide.
        """
        super().__init__()
        norm: Any = partial(nn.LayerNorm, eps=1e-6)
        self.embed = nn.Linear(arch.width, width)
        self.mask_token = nn.Parameter(torch.empty(1, 1, width))
        positions_LW = mae_position_embedding(arch.grid, width=width)
        self.register_buffer("pos_embed", positions_LW[None], persistent=False)
        blocks = [
            Block(width, num_heads, qkv_bias=True, norm_layer=norm)
            for _ in range(depth)
        ]
        self.blocks = nn.Sequential(*blocks)
        self.norm = norm(width)
        self.predict = nn.Linear(width, arch.patch_values)

        # MAE draws Q, K and V as one matrix, which narrows their range.
        nn.init.normal_(self.mask_token, std=TOKEN_STD)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(
        self,
        vit: ViT,
        images_B3SS: torch.Tensor,
        *,
        kept_BK: torch.Tensor,
        restore_BL: torch.Tensor,
    ) -> torch.Tensor:
        """Predicted patches [B, L, P].

        kept_BK: numbers of the kept patches. restore_BL: the position of each patch in the order
        of the kept ones and then the removed ones.
        """
        embedded_BKW = self.embed(encode_kept(vit, images_B3SS, kept_BK=kept_BK))
        class_B1W = embedded_BKW[:, :1]
        visible_BKW = embedded_BKW[:, 1:]

        # The mask token stands for each removed patch, and the position tells which one it is.
        num_removed = restore_BL.shape[1] - kept_BK.shape[1]
        masks_BRW = self.mask_token.expand(len(images_B3SS), num_removed, -1)
        ordered_BLW = torch.cat([visible_BKW, masks_BRW.to(visible_BKW.dtype)], dim=1)
        patches_BLW = take_patches(ordered_BLW, restore_BL) + self.pos_embed

        # The class token's position is zero.
        tokens_BXW = torch.cat([class_B1W.to(patches_BLW.dtype), patches_BLW], dim=1)
        decoded_BXW = run_blocks(
            self.blocks, tokens_BXW, recompute=vit.grad_checkpointing
        )
        predicted_BLP: torch.Tensor = self.predict(self.norm(decoded_BXW))[:, 1:]
        return predicted_BLP


def encode_kept(
    vit: ViT, images_B3SS: torch.Tensor, *, kept_BK: torch.Tensor
) -> torch.Tensor:
    """Class token and kept patches through the encoder [B, 1 + K, D].

    Positions are added before the others are removed, and the class token after.
    """
    assert vit.pos_embed is not None and vit.cls_token is not None
    positions_1LD: torch.Tensor = vit.pos_embed
    class_11D: torch.Tensor = vit.cls_token
    patches_BLD: torch.Tensor = vit.patch_embed(images_B3SS)

    # A row before the patches, if there is one, is the class token's.
    num_patches = patches_BLD.shape[1]
    patches_BLD = patches_BLD + positions_1LD[:, -num_patches:]
    if positions_1LD.shape[1] > num_patches:
        class_11D = class_11D + positions_1LD[:, :1]

    # The encoder never computes the removed patches, which makes MAE cheap.
    kept_BKD = take_patches(patches_BLD, kept_BK)
    class_B1D = class_11D.expand(len(kept_BKD), -1, -1).to(kept_BKD.dtype)
    tokens_BXD = torch.cat([class_B1D, kept_BKD], dim=1)
    return vit.run_blocks(vit.pos_drop(tokens_BXD))


def patch_statistics(patches_BLP: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and deviation of each patch [B, L, 1]; the variance is the unbiased one."""
    # Uniform patches have no variance; the small term keeps their division finite.
    variance, mean = torch.var_mean(patches_BLP, dim=2, keepdim=True)
    return mean, (variance + VARIANCE_EPS).sqrt()


def reconstruction_loss(
    predicted_BLP: torch.Tensor,
    patches_BLP: torch.Tensor,
    *,
    removed_BR: torch.Tensor,
    normalized: bool,
) -> torch.Tensor:
    """Squared error of the removed patches: the mean over pixels, then over patches. Scalar, fp32.

    normalized: predict each patch minus its mean, over its deviation (MAE, section 4.1).
    """
    # The difference of two near numbers would be mostly rounding in bf16.
    target_BRP = take_patches(patches_BLP.float(), removed_BR)
    if normalized:
        mean, deviation = patch_statistics(target_BRP)
        target_BRP = (target_BRP - mean) / deviation
    difference_BRP = take_patches(predicted_BLP.float(), removed_BR) - target_BRP
    return difference_BRP.square().mean()


def picture_rows(
    predicted_BLP: torch.Tensor,
    patches_BLP: torch.Tensor,
    *,
    removed_BR: torch.Tensor,
    grid: tuple[int, int],
    normalized: bool,
    mean: tuple[float, float, float],
    std: tuple[float, float, float],
) -> dict[str, torch.Tensor]:
    """Title -> uint8 images [B, 3, S, S]: the image, what the model sees, predicts, and both.

    patches_BLP: of pixels normalised by `mean` and `std`. normalized: the model predicts neither
    mean nor contrast of a patch; they are taken from the true one. Patches that the model sees have
    no loss, so what it gives for them means nothing and is left out.
    """
    # Pixels are computed in fp32: bf16 would show steps in smooth areas.
    predicted_BLP = predicted_BLP.float()
    if normalized:
        patch_mean, deviation = patch_statistics(patches_BLP)
        # The model predicts normalised patches; their true statistics make them visible.
        predicted_BLP = predicted_BLP * deviation + patch_mean

    is_removed_BL1 = torch.zeros_like(patches_BLP[:, :, :1], dtype=torch.bool)
    is_removed_BL1.scatter_(1, removed_BR[:, :, None], True)
    rows = {
        "image": patches_BLP,
        "visible": patches_BLP.masked_fill(is_removed_BL1, 0.0),
        "predicted": predicted_BLP.masked_fill(~is_removed_BL1, 0.0),
        "visible +\npredicted": torch.where(is_removed_BL1, predicted_BLP, patches_BLP),
    }

    # Back to pixels. A prediction may lie outside of what a pixel can be.
    mean_311 = patches_BLP.new_tensor(mean).view(3, 1, 1)
    std_311 = patches_BLP.new_tensor(std).view(3, 1, 1)
    images = {}
    for title, row_BLP in rows.items():
        images_B3SS = to_images(row_BLP, grid=grid) * std_311 + mean_311
        images[title] = (images_B3SS.clamp(0, 1) * 255).round().byte()
    return images
