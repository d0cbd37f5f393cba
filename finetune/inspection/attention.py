"""Read the attention of every layer and head; draw that of the last layer, and its rollout.

Attention is computed again from the input of each attention module, since fused attention never
materialises it. A head is reduced before the next one is computed, so that a layer takes the memory
of one head.

Last layer: Caron et al. 2021 (DINO), figure 1.
Rollout: Abnar and Zuidema 2020; Dosovitskiy et al. 2021, figure 6 and appendix D.8.

Shapes: B images, T tokens (prefix tokens first), L patches, R and C rows and columns of patches, H
heads, E channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial, reduce
from typing import Any

import torch
from matplotlib.figure import Figure

from finetune.inspection.below import draw_heat
from finetune.inspection.visualized import Visualized
from vitscale.evaluation.trained_model import InferenceModel
from vitscale.models.interface import attention_modules

Consume = Callable[[int, Iterator[torch.Tensor]], None]
RESIDUAL = 0.5  # weight of the identity, which stands for the residual connection


def attention_by_head(attention: Any, x_BTD: torch.Tensor) -> Iterator[torch.Tensor]:
    """softmax(q k / sqrt(E)) of each head in turn, fp32 [B, T, T]; rows are queries.

    attention: timm's `Attention`. x: its input.
    """
    qkv_BT3HE = attention.qkv(x_BTD).unflatten(
        -1, (3, attention.num_heads, attention.head_dim)
    )
    q_BTHE, k_BTHE, _ = qkv_BT3HE.unbind(2)

    # The weights of a row would not sum to 1 in half precision.
    q_BTHE = attention.q_norm(q_BTHE).float()
    k_BTHE = attention.k_norm(k_BTHE).float()
    for head in range(attention.num_heads):
        k_BET = k_BTHE[:, :, head].transpose(1, 2)
        scores_BTT = torch.bmm(q_BTHE[:, :, head] * attention.scale, k_BET)
        yield scores_BTT.softmax(dim=-1)


@torch.no_grad()
def read_attention(
    model: InferenceModel, images_B3SS: torch.Tensor, consume: Consume
) -> None:
    """One forward pass; `consume(layer, attention of its heads)` is called layer by layer.

    images: uint8. Each head's attention [B, T, T] is computed when it is
    taken, and not used again: `consume` may overwrite it.
    """

    def read(layer: int, attention: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        consume(layer, attention_by_head(attention, inputs[0]))

    # A hook that stays would read the attention of every later forward pass.
    with ExitStack() as hooks:
        for layer, attention in enumerate(attention_modules(model.network)):
            hook = attention.register_forward_pre_hook(partial(read, layer))
            hooks.enter_context(hook)
        model.forward(images_B3SS, "features")


def rolled_out(
    product_BTT: torch.Tensor | None, mean_BTT: torch.Tensor
) -> torch.Tensor:
    """Multiply the next layer, averaged over its heads, onto the product of those before it.

    Half of a layer is the identity. Overwrites `mean_BTT`.
    """
    # Overwritten in place, as a second matrix of all tokens may not fit.
    mixed_BTT = mean_BTT.mul_(1 - RESIDUAL)
    mixed_BTT.diagonal(dim1=1, dim2=2).add_(RESIDUAL)
    mixed_BTT /= mixed_BTT.sum(dim=-1, keepdim=True)
    if product_BTT is None:
        return mixed_BTT
    return torch.bmm(mixed_BTT, product_BTT)


@torch.no_grad()
def attention_rollout(model: InferenceModel, images_B3SS: torch.Tensor) -> torch.Tensor:
    """Return the attention of each output token to each input token: fp32 [B, T, T], rows sum to 1.

    images: uint8. Layer by layer: no other matrix is kept.
    """
    num_heads = attention_modules(model.network)[0].num_heads
    product: torch.Tensor | None = None

    def add(layer: int, heads: Iterator[torch.Tensor]) -> None:
        nonlocal product
        # Summed in place, as a second matrix of all tokens may not fit.
        sum_BTT = reduce(torch.Tensor.add_, heads)
        product = rolled_out(product, sum_BTT.div_(num_heads))

    read_attention(model, images_B3SS, add)
    assert product is not None
    return product


def last_attention(model: InferenceModel, images_B3SS: torch.Tensor) -> torch.Tensor:
    """Return the attention of the last layer, the mean of its heads: fp32 [B, T, T]."""
    modules = attention_modules(model.network)
    means = []

    def add(layer: int, heads: Iterator[torch.Tensor]) -> None:
        if layer == len(modules) - 1:
            means.append(reduce(torch.Tensor.add_, heads) / modules[layer].num_heads)

    read_attention(model, images_B3SS, add)
    return means[0]


def patch_weights(
    rollout_BTT: torch.Tensor,
    *,
    num_prefix_tokens: int,
    grid: tuple[int, int],
    pooled: bool,
) -> torch.Tensor:
    """Weight of each patch over the largest one: [B, R, C].

    From the row of the class token, which is the first; pooled: from the mean of the patches' rows.
    """
    # A pooled model has no token that gathers the image, so all patches count alike.
    rows_BXT = rollout_BTT[:, :1]
    if pooled:
        rows_BXT = rollout_BTT[:, num_prefix_tokens:]
    weights_BL = rows_BXT.mean(dim=1)[:, num_prefix_tokens:]
    return (weights_BL / weights_BL.amax(dim=1, keepdim=True)).unflatten(1, grid)


def draw_rollout(subject: Visualized) -> Figure:
    """What reaches the class token, or the mean of the patches, through all layers."""
    return _draw_attention(
        subject, attention_rollout, "Attention rollout: {} draws on, through all layers"
    )


def draw_last_layer(subject: Visualized) -> Figure:
    """The attention of the class token, or the mean of the patches, as DINO shows it."""
    return _draw_attention(
        subject,
        last_attention,
        "Attention of the last layer: {} looks at, mean of heads",
    )


def _draw_attention(
    subject: Visualized,
    attention: Callable[[InferenceModel, torch.Tensor], torch.Tensor],
    text: str,
) -> Figure:
    """attention: of each token to each one, [B, T, T]. text: with a place for who attends."""
    _, images_B3SS, _ = subject.drawn

    # In parts, since attention of all tokens to all takes their square.
    weights = [
        patch_weights(
            attention(subject.model, batch_B3SS),
            num_prefix_tokens=subject.num_prefix_tokens,
            grid=subject.grid,
            pooled=subject.is_pooled,
        )
        for batch_B3SS in images_B3SS.split(subject.attention_batch)
    ]

    # The title says who attends: the token that the head reads, or all patches.
    source = "what the class token"
    if subject.is_pooled:
        source = "what the mean of all patches"
    label = "weight, relative to the largest one of the image"
    return draw_heat(
        subject, text.format(source), torch.cat(weights).cpu(), label=label
    )
