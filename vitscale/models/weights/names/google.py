"""Google's names of tensors, and ours: vision_transformer, big_vision and big_transfer.

Leaves out: reading files (`reading`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch

from vitscale.models.weights.names.fused_qkv import joined

Name = str | Callable[[re.Match[str]], str]
Turn = Callable[[torch.Tensor], torch.Tensor]

# Every file of a model has one of these.
FIRST_NAMES = ("embedding/kernel", "resnet/root_block/standardized_conv2d/kernel")

# Patterns over names of vit_jax and big_vision, which number the modules of a block differently.
_BLOCK = r"Transformer/encoderblock_(\d+)/"
_ATTENTION = _BLOCK + r"MultiHeadDotProductAttention_[01]/"
# The pooling head of big_vision, models/vit.py, `MAPHead`.
_MAP = r"MAPHead_0/"
_MAP_ATTENTION = _MAP + r"MultiHeadDotProductAttention_0/"
# The same of big_transfer; some of its files number the modules of a unit.
_UNIT = r"block(\d+)/unit(\d+)/"
_BIT_CONV, _BIT_NORM = r"standardized_conv2d(?:_\d+)?/kernel", r"group_norm(?:_\d+)?/"
_STEM = "patch_embed.backbone."


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _transposed(x: torch.Tensor) -> torch.Tensor:
    return x.T


def _in_heads(x_DHE: torch.Tensor) -> torch.Tensor:
    return x_DHE.flatten(1).T


def _out_of_heads(x_HED: torch.Tensor) -> torch.Tensor:
    return x_HED.flatten(0, 1).T


def _kernel(x_HWIO: torch.Tensor) -> torch.Tensor:
    return x_HWIO.permute(3, 2, 0, 1)


def _in_unit(match: re.Match[str], stem: str, part: str) -> str:
    """timm counts stages and units from 0."""
    return f"{stem}stages.{int(match[1]) - 1}.blocks.{int(match[2]) - 1}.{part}"


def _unit_names() -> Iterator[tuple[str, Name, int, Turn]]:
    """The units of a hybrid's stem, and of BiT, whose convolutions have letters."""
    parts = {"conv1": "conv1", "conv2": "conv2", "conv3": "conv3", "conv_proj": "downsample.conv"}
    for theirs, ours in parts.items():
        yield (
            _UNIT + f"{theirs}/kernel",
            partial(_in_unit, stem=_STEM, part=f"{ours}.weight"),
            4,
            _kernel,
        )
    parts = {"gn1": "norm1", "gn2": "norm2", "gn3": "norm3", "gn_proj": "downsample.norm"}
    for theirs, ours in parts.items():
        for value, kind in (("scale", "weight"), ("bias", "bias")):
            # Older files hold them as [1, 1, 1, channels].
            for num_dims in (1, 4):
                name = partial(_in_unit, stem=_STEM, part=f"{ours}.{kind}")
                yield _UNIT + f"{theirs}/{value}", name, num_dims, torch.flatten
    parts = {"a": "1", "b": "2", "c": "3"}
    for theirs, number in parts.items():
        name = partial(_in_unit, stem="", part=f"conv{number}.weight")
        yield f"resnet/{_UNIT}{theirs}/{_BIT_CONV}", name, 4, _kernel
        for value, kind in (("gamma", "weight"), ("beta", "bias")):
            for num_dims in (1, 4):
                name = partial(_in_unit, stem="", part=f"norm{number}.{kind}")
                yield f"resnet/{_UNIT}{theirs}/{_BIT_NORM}{value}", name, num_dims, torch.flatten
    name = partial(_in_unit, stem="", part="downsample.conv.weight")
    yield f"resnet/{_UNIT}a/proj/{_BIT_CONV}", name, 4, _kernel


# (pattern, our name, dimensions, how a tensor is turned)
NAMES: tuple[tuple[str, Name, int, Turn], ...] = (
    (r"cls", "cls_token", 3, _same),
    (r"(?:Transformer/)?(?:posembed_input/)?pos_embedding", "pos_embed", 3, _same),
    (r"embedding/kernel", "patch_embed.proj.weight", 4, _kernel),
    (r"embedding/bias", "patch_embed.proj.bias", 1, _same),
    (r"Transformer/encoder_norm/scale", "norm.weight", 1, _same),
    (r"Transformer/encoder_norm/bias", "norm.bias", 1, _same),
    (_BLOCK + r"LayerNorm_0/scale", r"blocks.\1.norm1.weight", 1, _same),
    (_BLOCK + r"LayerNorm_0/bias", r"blocks.\1.norm1.bias", 1, _same),
    (_BLOCK + r"LayerNorm_[12]/scale", r"blocks.\1.norm2.weight", 1, _same),
    (_BLOCK + r"LayerNorm_[12]/bias", r"blocks.\1.norm2.bias", 1, _same),
    # [width, heads, width / heads] each; joined to one below.
    (_ATTENTION + r"(query|key|value)/kernel", r"blocks.\1.attn.\2.weight", 3, _in_heads),
    (_ATTENTION + r"(query|key|value)/bias", r"blocks.\1.attn.\2.bias", 2, torch.flatten),
    (_ATTENTION + r"out/kernel", r"blocks.\1.attn.proj.weight", 3, _out_of_heads),
    (_ATTENTION + r"out/bias", r"blocks.\1.attn.proj.bias", 1, _same),
    (_BLOCK + r"MlpBlock_[03]/Dense_0/kernel", r"blocks.\1.mlp.fc1.weight", 2, _transposed),
    (_BLOCK + r"MlpBlock_[03]/Dense_0/bias", r"blocks.\1.mlp.fc1.bias", 1, _same),
    (_BLOCK + r"MlpBlock_[03]/Dense_1/kernel", r"blocks.\1.mlp.fc2.weight", 2, _transposed),
    (_BLOCK + r"MlpBlock_[03]/Dense_1/bias", r"blocks.\1.mlp.fc2.bias", 1, _same),
    (r"pre_logits/kernel", "pre_logits.weight", 2, _transposed),
    (r"pre_logits/bias", "pre_logits.bias", 1, _same),
    (_MAP + r"probe", "attn_pool.latent", 3, _same),
    (_MAP_ATTENTION + r"query/kernel", "attn_pool.q.weight", 3, _in_heads),
    (_MAP_ATTENTION + r"query/bias", "attn_pool.q.bias", 2, torch.flatten),
    (_MAP_ATTENTION + r"(key|value)/kernel", r"attn_pool.\1.weight", 3, _in_heads),
    (_MAP_ATTENTION + r"(key|value)/bias", r"attn_pool.\1.bias", 2, torch.flatten),
    (_MAP_ATTENTION + r"out/kernel", "attn_pool.proj.weight", 3, _out_of_heads),
    (_MAP_ATTENTION + r"out/bias", "attn_pool.proj.bias", 1, _same),
    (_MAP + r"LayerNorm_0/scale", "attn_pool.norm.weight", 1, _same),
    (_MAP + r"LayerNorm_0/bias", "attn_pool.norm.bias", 1, _same),
    (_MAP + r"MlpBlock_0/Dense_0/kernel", "attn_pool.mlp.fc1.weight", 2, _transposed),
    (_MAP + r"MlpBlock_0/Dense_0/bias", "attn_pool.mlp.fc1.bias", 1, _same),
    (_MAP + r"MlpBlock_0/Dense_1/kernel", "attn_pool.mlp.fc2.weight", 2, _transposed),
    (_MAP + r"MlpBlock_0/Dense_1/bias", "attn_pool.mlp.fc2.bias", 1, _same),
    (r"head/kernel", "head.weight", 2, _transposed),
    (r"head/bias", "head.bias", 1, _same),
    (r"conv_root/kernel", _STEM + "stem.conv.weight", 4, _kernel),
    *((r"gn_root/scale", _STEM + "stem.norm.weight", dims, torch.flatten) for dims in (1, 4)),
    *((r"gn_root/bias", _STEM + "stem.norm.bias", dims, torch.flatten) for dims in (1, 4)),
    (rf"resnet/root_block/{_BIT_CONV}", "stem.conv.weight", 4, _kernel),
    *((rf"resnet/{_BIT_NORM}gamma", "norm.weight", dims, torch.flatten) for dims in (1, 4)),
    *((rf"resnet/{_BIT_NORM}beta", "norm.bias", dims, torch.flatten) for dims in (1, 4)),
    (r"resnet/head/conv2d/kernel", "head.fc.weight", 4, _kernel),
    (r"resnet/head/conv2d/bias", "head.fc.bias", 1, _same),
    *_unit_names(),
)


def heads_of(tensors: Mapping[str, torch.Tensor]) -> int | None:
    """Attention heads, which only Google's shapes show: kernels are [width, heads, head width]."""
    for name, tensor in _unstacked(tensors).items():
        if re.fullmatch(_ATTENTION + "query/kernel", name) and tensor.ndim == 3:
            return int(tensor.shape[1])
    return None


def _unstacked(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Blocks that big_vision scans are stacked along the first axis; here each has its name."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"Transformer/encoderblock/(.*)", name)
        if match is None or tensor.ndim < 2:
            found[name] = tensor
            continue
        for block, part in enumerate(tensor):
            found[f"Transformer/encoderblock_{block}/{match[1]}"] = part
    return found


def renamed(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Under our names; what has none keeps its own, for the table of what does not fit."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in _unstacked(tensors).items():
        for pattern, ours, num_dims, turn in NAMES:
            match = re.fullmatch(pattern, name)
            if match is not None and tensor.ndim == num_dims:
                found[match.expand(ours) if isinstance(ours, str) else ours(match)] = turn(
                    tensor
                ).contiguous()
                break
        else:
            found[name] = tensor
    if not any(name.startswith(_STEM + "stages.") for name in found):
        # A hybrid whose stem is the root alone: timm has no module around it.
        found = {name.replace(_STEM + "stem.", _STEM): value for name, value in found.items()}
    return joined(found)
