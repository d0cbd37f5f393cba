"""Initial values of a Vision Transformer, as the papers' code draws them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch import nn

# Standard deviation of a unit normal that is cut at plus and minus 2.
CUT_NORMAL_STD = 0.87962566103423978
MLP_BIAS_STD = 1e-6  # vision_transformer, MlpBlock
POSITION_STD = 0.02  # vision_transformer, AddPositionEmbs
DEIT_STD = 0.02
REGISTER_STD = 1e-6  # DINOv2, init_weights; never zero, or all registers would stay equal
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
    scheme: str = "vit",
) -> None:
    """Initialise as the papers' code does: `scheme` is one of `SCHEMES`.

    Norms are 1 and 0, the last layer is zero unless `head_std` is given, and layer scales keep the
    value they were built with. What few models have is drawn last, so that it changes no other
    weight of the same seed.
    """
    random, chosen = torch.Generator().manual_seed(seed), SCHEMES[scheme]
    for name, module in model.named_modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
            chosen.dense(name, module, random)
    chosen.patches(model.patch_embed.proj, random)
    if isinstance(model.pos_embed, nn.Parameter):
        nn.init.normal_(model.pos_embed, std=position_std, generator=random)
    if model.cls_token is not None:
        nn.init.zeros_(model.cls_token)
        if chosen.token_std:
            nn.init.normal_(model.cls_token, std=chosen.token_std, generator=random)
    if model.reg_token is not None:
        nn.init.normal_(model.reg_token, std=REGISTER_STD, generator=random)
    if isinstance(model, VisionTransformerDistilled):
        std = DEIT_STD if scheme == "deit" else 0.0  # as the class token
        nn.init.normal_(model.dist_token, std=std, generator=random)
    if model.attn_pool is not None:  # big_vision, models/vit.py, MAPHead
        nn.init.xavier_uniform_(model.attn_pool.latent[0], generator=random)
    for last in last_layers(model):
        # With zero weights every class starts at the same probability.
        nn.init.zeros_(last.weight)
        nn.init.constant_(last.bias, head_bias)
        if head_std > 0:
            nn.init.normal_(last.weight, std=head_std, generator=random)


def _dense_of_flax(name: str, layer: nn.Linear, random: torch.Generator) -> None:
    """Xavier-uniform kernels, with Q, K and V as three matrices: initialised as one fused matrix
    their bounds would be 0.707 times too small. MLP biases N(0, 1e-6). The representation layer
    names no initialisation there, so it is LeCun-normal.
    """
    if name == "head.0":
        _lecun_normal(layer.weight, random)
    else:
        for part in layer.weight.chunk(FUSED.get(name.rpartition(".")[2], 1)):
            nn.init.xavier_uniform_(part, generator=random)
    if ".mlp." in name:
        nn.init.normal_(layer.bias, std=MLP_BIAS_STD, generator=random)


def _patches_of_flax(layer: nn.Conv2d, random: torch.Generator) -> None:
    assert layer.bias is not None
    _lecun_normal(layer.weight, random)
    nn.init.zeros_(layer.bias)


def _lecun_normal(weight: torch.Tensor, random: torch.Generator) -> None:
    """Flax's default for kernels: truncated at 2 sigma, variance 1 / fan-in."""
    std = weight[0].numel() ** -0.5 / CUT_NORMAL_STD
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std, generator=random)


def _dense_of_deit(name: str, layer: nn.Linear, random: torch.Generator) -> None:
    """N(0, 0.02); its truncation, at plus and minus 2 (a hundred sigma), never acts."""
    nn.init.normal_(layer.weight, std=DEIT_STD, generator=random)


def _patches_of_deit(layer: nn.Conv2d, random: torch.Generator) -> None:
    """PyTorch's default."""
    assert layer.bias is not None
    bound = layer.weight[0].numel() ** -0.5
    nn.init.uniform_(layer.weight, -bound, bound, generator=random)
    nn.init.uniform_(layer.bias, -bound, bound, generator=random)


def _dense_of_mae(name: str, layer: nn.Linear, random: torch.Generator) -> None:
    """Xavier-uniform kernels, Q, K and V as one matrix."""
    nn.init.xavier_uniform_(layer.weight, generator=random)


def _patches_of_mae(layer: nn.Conv2d, random: torch.Generator) -> None:
    """As if it were a dense layer on the flattened patch, its bias as PyTorch makes it."""
    assert layer.bias is not None
    nn.init.xavier_uniform_(layer.weight.flatten(1), generator=random)
    bound = layer.weight[0].numel() ** -0.5
    nn.init.uniform_(layer.bias, -bound, bound, generator=random)


class Scheme(NamedTuple):
    dense: Callable[[str, nn.Linear, torch.Generator], None]
    """Draws a dense layer, whose bias is zero."""
    patches: Callable[[nn.Conv2d, torch.Generator], None]
    token_std: float
    """Of the class token."""


SCHEMES = {
    # vision_transformer, `models_vit.py`, and the defaults of Flax.
    "vit": Scheme(_dense_of_flax, _patches_of_flax, 0.0),
    # DeiT-III, `models_v2.py`.
    "deit": Scheme(_dense_of_deit, _patches_of_deit, DEIT_STD),
    # MAE, `models_mae.py`.
    "mae": Scheme(_dense_of_mae, _patches_of_mae, 0.02),
}


def last_layers(model: VisionTransformer) -> list[nn.Linear]:
    """Of the head and, if there is one, the distillation head; empty without classes."""
    heads = [model.head, getattr(model, "head_dist", None)]
    lasts = [head[-1] if isinstance(head, nn.Sequential) else head for head in heads]
    return [last for last in lasts if isinstance(last, nn.Linear)]
