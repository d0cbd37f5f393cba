"""Initial values of a Vision Transformer, as the papers' code draws them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch import nn

# Standard deviation of a unit normal that is cut at plus and minus 2.
CUT_NORMAL_STD = 0.87962566103423978
MLP_BIAS_STD = 1e-6  # vision_transformer, MlpBlock
POSITION_STD = 0.02  # vision_transformer, AddPositionEmbs
DEIT_STD = 0.02
MAE_STD = 0.02
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
    random = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
    SCHEMES[scheme](model, random, position_std)
    if model.reg_token is not None:
        nn.init.normal_(model.reg_token, std=REGISTER_STD, generator=random)
    if isinstance(model, VisionTransformerDistilled):
        std = DEIT_STD if scheme == "deit" else 0.0  # as the class token
        nn.init.normal_(model.dist_token, std=std, generator=random)
    if model.attn_pool is not None:  # big_vision, models/vit.py, MAPHead
        nn.init.xavier_uniform_(model.attn_pool.latent[0], generator=random)
    reset_head(model, bias=head_bias)
    for last in last_layers(model):
        if head_std > 0:
            nn.init.normal_(last.weight, std=head_std, generator=random)


def _initialize_as_flax(
    model: VisionTransformer, random: torch.Generator, position_std: float
) -> None:
    """vision_transformer, `models_vit.py`, and the defaults of Flax.

    Xavier-uniform kernels, with Q, K and V as three matrices: initialised as one fused matrix
    their bounds would be 0.707 times too small. MLP biases N(0, 1e-6), class token zero. What
    names no initialisation there, the patches and the representation layer, is LeCun-normal.
    """
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        parts = module.weight.chunk(FUSED.get(name.rpartition(".")[2], 1))
        for part in parts:
            if name == "head.0":
                lecun_normal(part, random)
            else:
                nn.init.xavier_uniform_(part, generator=random)
        if ".mlp." in name:
            nn.init.normal_(module.bias, std=MLP_BIAS_STD, generator=random)
        else:
            nn.init.zeros_(module.bias)
    lecun_normal(model.patch_embed.proj.weight, random)
    nn.init.zeros_(model.patch_embed.proj.bias)
    if isinstance(model.pos_embed, nn.Parameter):
        nn.init.normal_(model.pos_embed, std=position_std, generator=random)
    if model.cls_token is not None:
        nn.init.zeros_(model.cls_token)


def _initialize_as_deit(
    model: VisionTransformer, random: torch.Generator, position_std: float
) -> None:
    """DeiT-III, `models_v2.py`: N(0, 0.02) but for the patches, which keep PyTorch's default.

    Its truncation, at plus and minus 2 (a hundred sigma), never acts.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=DEIT_STD, generator=random)
            nn.init.zeros_(module.bias)
    patch = model.patch_embed.proj
    bound = patch.weight[0].numel() ** -0.5
    nn.init.uniform_(patch.weight, -bound, bound, generator=random)
    nn.init.uniform_(patch.bias, -bound, bound, generator=random)
    if isinstance(model.pos_embed, nn.Parameter):
        nn.init.normal_(model.pos_embed, std=position_std, generator=random)
    if model.cls_token is not None:
        nn.init.normal_(model.cls_token, std=DEIT_STD, generator=random)


def _initialize_as_mae(
    model: VisionTransformer, random: torch.Generator, position_std: float
) -> None:
    """MAE, `models_mae.py`: Xavier-uniform kernels, Q, K and V as one matrix, biases 0.

    The patch kernel as if it were a dense layer on the flattened patch, its bias as PyTorch makes
    it.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight, generator=random)
            nn.init.zeros_(module.bias)
    patch = model.patch_embed.proj
    nn.init.xavier_uniform_(patch.weight.flatten(1), generator=random)
    bound = patch.weight[0].numel() ** -0.5
    nn.init.uniform_(patch.bias, -bound, bound, generator=random)
    if isinstance(model.pos_embed, nn.Parameter):
        nn.init.normal_(model.pos_embed, std=position_std, generator=random)
    if model.cls_token is not None:
        nn.init.normal_(model.cls_token, std=MAE_STD, generator=random)


SCHEMES: dict[str, Callable[[VisionTransformer, torch.Generator, float], None]] = {
    "vit": _initialize_as_flax,
    "deit": _initialize_as_deit,
    "mae": _initialize_as_mae,
}


def lecun_normal(weight: torch.Tensor, random: torch.Generator) -> None:
    """Flax's default for kernels: truncated at 2 sigma, variance 1 / fan-in."""
    std = weight[0].numel() ** -0.5 / CUT_NORMAL_STD
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std, generator=random)


@torch.no_grad()
def reset_head(model: VisionTransformer, *, bias: float) -> None:
    """Zero the last layers; with zero weights every class starts at the same probability."""
    for last in last_layers(model):
        nn.init.zeros_(last.weight)
        nn.init.constant_(last.bias, bias)


def last_layers(model: VisionTransformer) -> list[nn.Linear]:
    """Of the head and, if there is one, the distillation head; empty without classes."""
    heads = (
        [model.head, model.head_dist]
        if isinstance(model, VisionTransformerDistilled)
        else [model.head]
    )
    lasts = [head[-1] if isinstance(head, nn.Sequential) else head for head in heads]
    return [last for last in lasts if isinstance(last, nn.Linear)]
