"""Read the attention of every layer and head, one matrix at a time.

Attention is computed again from the input of each attention module, since fused attention never
materialises it. A head is reduced before the next one is computed, so that a layer takes the memory
of one head.

Shapes: B images, T tokens (prefix tokens first), L patches, H heads, E channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from vitscale.evaluation.models.inference import InferenceModel

Consume = Callable[[int, int, torch.Tensor], None]


def attention_modules(network: nn.Module) -> list[Any]:
    """timm's attention of each block, first layer first; empty for a model without any."""
    blocks = getattr(network, "blocks", ())
    return [block.attn for block in blocks if hasattr(getattr(block, "attn", None), "qkv")]


def attention_by_head(attention: Any, x_BTD: torch.Tensor) -> Iterator[torch.Tensor]:
    """softmax(q k / sqrt(E)) of each head in turn, fp32 [B, T, T]; rows are queries.

    attention: timm's `Attention`. x: its input.
    """
    qkv_BT3HE = attention.qkv(x_BTD).unflatten(-1, (3, attention.num_heads, attention.head_dim))
    q_BTHE, k_BTHE, _ = qkv_BT3HE.unbind(2)
    q_BTHE, k_BTHE = attention.q_norm(q_BTHE).float(), attention.k_norm(k_BTHE).float()
    # In fp32: autocast would round the scores.
    with torch.autocast(x_BTD.device.type, enabled=False):
        for head in range(attention.num_heads):
            k_BET = k_BTHE[:, :, head].transpose(1, 2)
            scores_BTT = torch.bmm(q_BTHE[:, :, head] * attention.scale, k_BET)
            yield scores_BTT.softmax(dim=-1)


@torch.no_grad()
def read_attention(model: InferenceModel, images_B3SS: torch.Tensor, consume: Consume) -> None:
    """One forward pass; `consume(layer, head, attention [B, T, T])` is called in order.

    images: uint8 on the model's device. The matrix is not used again: `consume` may overwrite it.
    """

    def hook(layer: int) -> Callable[..., None]:
        def read(attention: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            for head, p_BTT in enumerate(attention_by_head(attention, inputs[0])):
                consume(layer, head, p_BTT)

        return read

    modules = attention_modules(model.network)
    handles = [each.register_forward_pre_hook(hook(layer)) for layer, each in enumerate(modules)]
    try:
        model.forward(images_B3SS, "features")
    finally:
        for handle in handles:
            handle.remove()


def patch_attention(p_BTT: torch.Tensor, *, num_prefix_tokens: int) -> torch.Tensor:
    """Attention among patches [B, L, L]: without rows and columns of prefix tokens, rows of sum 1.

    A row that attends to no patch becomes uniform.
    """
    p_BLL = p_BTT[:, num_prefix_tokens:, num_prefix_tokens:]
    sums_BL1 = p_BLL.sum(dim=-1, keepdim=True)
    uniform = 1 / p_BLL.shape[-1]
    return torch.where(sums_BL1 > 0, p_BLL / sums_BL1, torch.full_like(p_BLL, uniform))
