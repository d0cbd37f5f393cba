"""Initial values of a Vision Transformer, as the papers' code draws them."""

from __future__ import annotations

from typing import Literal

import torch
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch import nn

# Standard deviation of a unit normal that is cut at plus and minus 2.
CUT_NORMAL_STD = 0.87962566103423978
MLP_BIAS_STD = 1e-6  # vision_transformer, MlpBlock
POSITION_STD = 0.02  # vision_transformer, AddPositionEmbs
DEIT_STD = 0.02
TOKEN_STD = 0.02  # of DeiT and MAE
# DINOv2, init_weights; never zero, or all registers would stay equal.
REGISTER_STD = 1e-6
# Matrices of one layer of timm, by the end of its name.
FUSED = {"qkv": 3, "kv": 2}


@torch.no_grad()
def initialize(
    model: VisionTransformer,
    *,
    seed: int,
    head_bias: float,
    head_std: float = 0.0,
    position_std: float = POSITION_STD,
    scheme: Literal["vit", "deit", "mae"] = "vit",
) -> None:
    """Initialise as the papers' code does.

    scheme: vit: vision_transformer, `models_vit.py`, and the defaults of Flax. deit: DeiT-III,
    `models_v2.py`. mae: MAE, `models_mae.py`.
    Norms are 1 and 0, the last layer is zero unless `head_std` is given, and layer scales keep the
    value they were built with. What few models have is drawn last, so that it changes no other
    weight of the same seed.
    """
    # The order of the draws is part of the result: another one gives other weights for a seed.
    random = torch.Generator().manual_seed(seed)
    for name, module in model.named_modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
            _draw_dense(name, module, scheme, random)
    _draw_patches(model.patch_embed.proj, scheme, random)

    if isinstance(model.pos_embed, nn.Parameter):
        nn.init.normal_(model.pos_embed, std=position_std, generator=random)
    if model.cls_token is not None:
        nn.init.zeros_(model.cls_token)
        if scheme != "vit":
            nn.init.normal_(model.cls_token, std=TOKEN_STD, generator=random)
    if model.reg_token is not None:
        nn.init.normal_(model.reg_token, std=REGISTER_STD, generator=random)
    if isinstance(model, VisionTransformerDistilled):
        std = TOKEN_STD if scheme == "deit" else 0.0  # as the class token
        nn.init.normal_(model.dist_token, std=std, generator=random)
    if model.attn_pool is not None:  # big_vision, models/vit.py, MAPHead
        nn.init.xavier_uniform_(model.attn_pool.latent[0], generator=random)

    # With zero weights every class starts at the same probability.
    for last in last_layers(model):
        nn.init.zeros_(last.weight)
        nn.init.constant_(last.bias, head_bias)
        if head_std > 0:
            nn.init.normal_(last.weight, std=head_std, generator=random)


def _draw_dense(
    name: str, layer: nn.Linear, scheme: str, random: torch.Generator
) -> None:
    """Draw a dense layer, whose bias is zero.

    Flax's are Xavier-uniform, with Q, K and V as three matrices: initialised as one fused matrix,
    as MAE does, their bounds would be 0.707 times too small. Its MLPs have biases N(0, 1e-6), and
    its representation layer names no initialisation, so it is LeCun-normal.
    DeiT's truncation, at plus and minus 2 (a hundred sigma), never acts.
    """
    if scheme == "deit":
        nn.init.normal_(layer.weight, std=DEIT_STD, generator=random)
        return
    if scheme == "mae":
        nn.init.xavier_uniform_(layer.weight, generator=random)
        return

    if name == "head.0":
        _lecun_normal(layer.weight, random)
    else:
        num_parts = FUSED.get(name.rpartition(".")[2], 1)
        for part in layer.weight.chunk(num_parts):
            nn.init.xavier_uniform_(part, generator=random)
    if ".mlp." in name:
        nn.init.normal_(layer.bias, std=MLP_BIAS_STD, generator=random)


def _draw_patches(layer: nn.Conv2d, scheme: str, random: torch.Generator) -> None:
    """Draw the patch embedding: as Flax does; as PyTorch does (DeiT); or (MAE) as if it were a
    dense layer on the flattened patch, with PyTorch's bias."""
    assert layer.bias is not None
    if scheme == "vit":
        _lecun_normal(layer.weight, random)
        nn.init.zeros_(layer.bias)
        return
    bound = layer.weight[0].numel() ** -0.5
    if scheme == "deit":
        nn.init.uniform_(layer.weight, -bound, bound, generator=random)
    else:
        nn.init.xavier_uniform_(layer.weight.flatten(1), generator=random)
    nn.init.uniform_(layer.bias, -bound, bound, generator=random)


def _lecun_normal(weight: torch.Tensor, random: torch.Generator) -> None:
    """Flax's default for kernels: truncated at 2 sigma, variance 1 / fan-in."""
    std = weight[0].numel() ** -0.5 / CUT_NORMAL_STD
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std, generator=random)


def last_layers(model: VisionTransformer) -> list[nn.Linear]:
    """Last layers of the head and of the distillation head, if any; empty without classes."""
    lasts = []
    for head in (model.head, getattr(model, "head_dist", None)):
        # A representation layer comes before the last one.
        last = head[-1] if isinstance(head, nn.Sequential) else head
        if isinstance(last, nn.Linear):
            lasts.append(last)
    return lasts
