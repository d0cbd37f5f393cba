"""Google's names and shapes of tensors, and ours, in one table for both directions.

Those of vision_transformer and of big_vision, and how names of old and new files differ.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch

from vitscale.models.weights.names import Tensors, joined, numbered

# Every file of a model has it.
FIRST_NAME = "embedding/kernel"


class Layout(NamedTuple):
    """Shape of a tensor in Google's files, and the conversions to and from ours."""

    num_dims: int
    read: Callable[[torch.Tensor], torch.Tensor]
    write: Callable[[torch.Tensor, int], torch.Tensor]
    """(our tensor, number of attention heads) -> theirs."""


SAME = Layout(3, lambda x: x, lambda x, heads: x)
VECTOR = Layout(1, lambda x: x, lambda x, heads: x)
# [in, out]
DENSE = Layout(2, lambda x: x.T, lambda x, heads: x.T)
# [height, width, in, out]
CONV = Layout(
    4, lambda x: x.permute(3, 2, 0, 1), lambda x, heads: x.permute(2, 3, 1, 0)
)
# [width, heads, head width], with biases [heads, head width]
INTO_HEADS = Layout(
    3, lambda x: x.flatten(1).T, lambda x, heads: x.T.unflatten(1, (heads, -1))
)
BIASES = Layout(2, torch.flatten, lambda x, heads: x.unflatten(0, (heads, -1)))
# [heads, head width, width]
OUT_OF_HEADS = Layout(
    3, lambda x: x.flatten(0, 1).T, lambda x, heads: x.T.unflatten(0, (heads, -1))
)
# Name of the kernel, and the layouts of kernel and bias.
LAYERS = {
    "dense": ("kernel", DENSE, VECTOR),
    "conv": ("kernel", CONV, VECTOR),
    "norm": ("scale", VECTOR, VECTOR),
    "into_heads": ("kernel", INTO_HEADS, BIASES),
    "out_of_heads": ("kernel", OUT_OF_HEADS, VECTOR),
}
# Theirs with big_vision's numbers of the modules, ours, and the kind of layer; {} is the number of
# the block. MAPHead is the pooling head of big_vision, models/vit.py.
NAMES = """\
embedding patch_embed.proj conv
Transformer/encoderblock_{}/LayerNorm_0 blocks.{}.norm1 norm
Transformer/encoderblock_{}/MultiHeadDotProductAttention_0/query blocks.{}.attn.query into_heads
Transformer/encoderblock_{}/MultiHeadDotProductAttention_0/key blocks.{}.attn.key into_heads
Transformer/encoderblock_{}/MultiHeadDotProductAttention_0/value blocks.{}.attn.value into_heads
Transformer/encoderblock_{}/MultiHeadDotProductAttention_0/out blocks.{}.attn.proj out_of_heads
Transformer/encoderblock_{}/LayerNorm_1 blocks.{}.norm2 norm
Transformer/encoderblock_{}/MlpBlock_0/Dense_0 blocks.{}.mlp.fc1 dense
Transformer/encoderblock_{}/MlpBlock_0/Dense_1 blocks.{}.mlp.fc2 dense
Transformer/encoder_norm norm norm
pre_logits pre_logits dense
MAPHead_0/MultiHeadDotProductAttention_0/query attn_pool.q into_heads
MAPHead_0/MultiHeadDotProductAttention_0/key attn_pool.key into_heads
MAPHead_0/MultiHeadDotProductAttention_0/value attn_pool.value into_heads
MAPHead_0/MultiHeadDotProductAttention_0/out attn_pool.proj out_of_heads
MAPHead_0/LayerNorm_0 attn_pool.norm norm
MAPHead_0/MlpBlock_0/Dense_0 attn_pool.mlp.fc1 dense
MAPHead_0/MlpBlock_0/Dense_1 attn_pool.mlp.fc2 dense
head head dense"""


def _rows() -> Iterator[tuple[str, str, Layout]]:
    """Yield (theirs, ours, layout) of each tensor."""
    yield "cls", "cls_token", SAME
    yield "pos_embedding", "pos_embed", SAME
    yield "MAPHead_0/probe", "attn_pool.latent", SAME
    for theirs, ours, kind in map(str.split, NAMES.splitlines()):
        kernel_name, kernel, bias = LAYERS[kind]
        yield f"{theirs}/{kernel_name}", f"{ours}.weight", kernel
        yield f"{theirs}/bias", f"{ours}.bias", bias


READ = {theirs: (ours, layout) for theirs, ours, layout in _rows()}
WRITE = {ours: (theirs, layout) for theirs, (ours, layout) in READ.items()}
# Modules of a block: (big_vision's, vision_transformer's).
NUMBERS = (
    ("MultiHeadDotProductAttention_0", "MultiHeadDotProductAttention_1"),
    ("LayerNorm_1", "LayerNorm_2"),
    ("MlpBlock_0", "MlpBlock_3"),
)


def from_google(tensors: Mapping[str, torch.Tensor]) -> tuple[Tensors, int | None]:
    """The tensors under our names, and the number of heads, which only Google's shapes show.

    Unknown tensors keep their names, which the table of misfits then lists.
    """
    renamed: Tensors = {}
    num_heads = None
    for name, tensor in _unstacked(tensors):
        # The three code bases have the positions in three modules.
        if re.fullmatch(r"(Transformer/)?(posembed_input/)?pos_embedding", name):
            name = "pos_embedding"
        template, number = numbered(name)
        if number:
            for new, old in NUMBERS:
                template = template.replace(f"/{old}/", f"/{new}/")

        ours, layout = READ.get(template, (name, None))
        if layout is None or layout.num_dims != tensor.ndim:
            renamed[name] = tensor
            continue
        if layout is INTO_HEADS and number:
            num_heads = int(tensor.shape[1])
        renamed[ours.format(number)] = layout.read(tensor).contiguous()
    return joined(renamed), num_heads


def _unstacked(
    tensors: Mapping[str, torch.Tensor],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name each block: big_vision stacks those that it scans along the first axis."""
    for name, tensor in tensors.items():
        match = re.fullmatch(r"Transformer/encoderblock/(.*)", name)
        if match is None or tensor.ndim < 2:
            yield name, tensor
            continue
        for block, part in enumerate(tensor):
            yield f"Transformer/encoderblock_{block}/{match[1]}", part
