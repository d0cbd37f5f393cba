"""Attention read layer by layer equals softmax(qk) by hand, and what timm extracts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import Attention
from timm.utils import AttentionExtract
from torch import nn

from finetune.inspection.attention import (
    attention_by_head,
    attention_modules,
    patch_attention,
    read_attention,
)
from tests.support.engine.vit_models import inference_model, random_images
from tests.support.peak_memory import peak_mib


def by_hand(attention: Any, x: torch.Tensor, head: int) -> torch.Tensor:
    """softmax(q k / sqrt(E)) of one head of one image [T, E], in fp64 and loops over tokens."""
    width, channels = attention.num_heads * attention.head_dim, attention.head_dim
    weight, bias = attention.qkv.weight.double(), attention.qkv.bias.double()
    first = head * channels
    rows = slice(first, first + channels), slice(width + first, width + first + channels)
    q, k = (x.double() @ weight[row].T + bias[row] for row in rows)
    q, k = (norm.double()(each) for norm, each in ((attention.q_norm, q), (attention.k_norm, k)))
    tokens = []
    for query in q:
        scores = [math.exp(float(query @ key) / math.sqrt(channels)) for key in k]
        tokens.append([score / sum(scores) for score in scores])
    return torch.tensor(tokens)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_attention_is_softmax_of_queries_and_keys(qk_norm: bool) -> None:
    torch.manual_seed(0)
    attention = Attention(12, num_heads=3, qkv_bias=True, qk_norm=qk_norm, norm_layer=nn.LayerNorm)
    nn.init.normal_(attention.qkv.bias)
    x = 3 * torch.randn(2, 5, 12)
    with torch.no_grad():
        found = list(attention_by_head(attention, x))
        assert len(found) == 3
        for head, p_BTT in enumerate(found):
            for image in range(2):
                expected = by_hand(attention, x[image], head).float()
                torch.testing.assert_close(p_BTT[image], expected, atol=1e-6, rtol=1e-5)


def test_attention_is_timms_although_fused() -> None:
    """timm's own extraction, in its graph mode, on the same fused modules."""
    model, images = inference_model(depth=2), random_images(2)
    assert all(each.fused_attn for each in attention_modules(model.network))
    found: dict[tuple[int, int], torch.Tensor] = {}
    read_attention(model, images, lambda layer, head, p: found.update({(layer, head): p.clone()}))
    for each in attention_modules(model.network):
        each.fused_attn = False
    extract = AttentionExtract(model.network, method="hook")
    with torch.no_grad():
        expected = extract(images / 127.5 - 1)
    assert len(found) == 2 * 2
    for (layer, head), p_BTT in found.items():
        of_timm = expected[f"blocks.{layer}.attn.attn_drop"][:, head]
        torch.testing.assert_close(p_BTT, of_timm, atol=1e-6, rtol=1e-5)


def test_prefix_tokens_are_left_out_and_rows_sum_to_one() -> None:
    attention = torch.tensor([[[0.2, 0.4, 0.4], [0.5, 0.1, 0.4], [1.0, 0.0, 0.0]]])
    among_patches = patch_attention(attention, num_prefix_tokens=1)
    torch.testing.assert_close(among_patches, torch.tensor([[[0.2, 0.8], [0.5, 0.5]]]))


def test_a_pass_takes_the_memory_of_one_head() -> None:
    """512 px: all maps of 6 layers and 16 heads would be 384 MiB, those of one layer 64 MiB.

    Measured 69 MiB, of which one map is 4 MiB; a layer's scores and their softmax add 128 MiB.
    """
    peak = peak_mib(
        imports="""
import torch
from finetune.inspection.pictures.attention_rollout import attention_rollout
from tests.support.engine.vit_models import inference_model, random_images
torch.set_num_threads(1)
model = inference_model(image_size=512, patch_size=16, width=64, num_heads=16, depth=6)
images = random_images(1, size=512)
attention_rollout(inference_model(), random_images(1))
""",
        work="attention_rollout(model, images)",
    )
    assert peak < 110
