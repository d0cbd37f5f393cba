"""Google's names and shapes of tensors, and ours: vision_transformer and big_vision.

Owns: one table of modules for both directions, and how names of old and new files differ.
Leaves out: reading files (`reading`) and writing them (`finetune.exporting.to_vitscale`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import torch

from vitscale.models.weights.names.fused_qkv import joined, split

# Every file of a model has it.
FIRST_NAME = "embedding/kernel"


@dataclass(frozen=True, slots=True)
class _Value:
    """One tensor of a module."""

    theirs: str
    ours: str
    num_dims: tuple[int, ...]
    """There."""
    read: Callable[[torch.Tensor], torch.Tensor]
    write: Callable[[torch.Tensor, int], torch.Tensor]
    """(our tensor, number of attention heads) -> theirs."""


def _vector(theirs: str, ours: str, *num_dims: int) -> _Value:
    return _Value(theirs, ours, num_dims, torch.flatten, lambda x, _: x)


_BIAS = _vector("/bias", ".bias", 1)
# Theirs: [in, out].
DENSE = (_Value("/kernel", ".weight", (2,), lambda x: x.T, lambda x, _: x.T), _BIAS)
# [height, width, in, out].
CONV = (
    _Value(
        *("/kernel", ".weight", (4,)),
        lambda x: x.permute(3, 2, 0, 1),
        lambda x, _: x.permute(2, 3, 1, 0),
    ),
    _BIAS,
)
# [width, heads, head width].
INTO_HEADS = (
    _Value(
        *("/kernel", ".weight", (3,)),
        lambda x: x.flatten(1).T,
        lambda x, num_heads: x.T.unflatten(1, (num_heads, -1)),
    ),
    _Value(
        *("/bias", ".bias", (2,)),
        torch.flatten,
        lambda x, num_heads: x.unflatten(0, (num_heads, -1)),
    ),
)
# [heads, head width, width].
OUT_OF_HEADS = (
    _Value(
        *("/kernel", ".weight", (3,)),
        lambda x: x.flatten(0, 1).T,
        lambda x, num_heads: x.T.unflatten(0, (num_heads, -1)),
    ),
    _BIAS,
)
NORM = (_vector("/scale", ".weight", 1), _vector("/bias", ".bias", 1))
# A tensor that is no part of a module.
TENSOR = (_Value("", "", (3,), lambda x: x, lambda x, _: x),)

Module = tuple[str, str, tuple[_Value, ...]]
"""(theirs, ours, its tensors). {} stands for the number of a block."""


def _attention(theirs: str, ours: str, *, query: str = "query") -> Iterator[Module]:
    for part, name in (("query", query), ("key", "key"), ("value", "value")):
        yield f"{theirs}/{part}", f"{ours}.{name}", INTO_HEADS
    yield f"{theirs}/out", f"{ours}.proj", OUT_OF_HEADS


# As big_vision numbers the modules of a block.
_BLOCK = "Transformer/encoderblock_{}"
_HEAD = "MAPHead_0"
VIT: tuple[Module, ...] = (
    ("cls", "cls_token", TENSOR),
    ("pos_embedding", "pos_embed", TENSOR),
    ("embedding", "patch_embed.proj", CONV),
    (f"{_BLOCK}/LayerNorm_0", "blocks.{}.norm1", NORM),
    *_attention(f"{_BLOCK}/MultiHeadDotProductAttention_0", "blocks.{}.attn"),
    (f"{_BLOCK}/LayerNorm_1", "blocks.{}.norm2", NORM),
    (f"{_BLOCK}/MlpBlock_0/Dense_0", "blocks.{}.mlp.fc1", DENSE),
    (f"{_BLOCK}/MlpBlock_0/Dense_1", "blocks.{}.mlp.fc2", DENSE),
    ("Transformer/encoder_norm", "norm", NORM),
    ("pre_logits", "pre_logits", DENSE),
    # The pooling head of big_vision, models/vit.py, `MAPHead`.
    (f"{_HEAD}/probe", "attn_pool.latent", TENSOR),
    *_attention(f"{_HEAD}/MultiHeadDotProductAttention_0", "attn_pool", query="q"),
    (f"{_HEAD}/LayerNorm_0", "attn_pool.norm", NORM),
    (f"{_HEAD}/MlpBlock_0/Dense_0", "attn_pool.mlp.fc1", DENSE),
    (f"{_HEAD}/MlpBlock_0/Dense_1", "attn_pool.mlp.fc2", DENSE),
    ("head", "head", DENSE),
)
# In a block: (of big_vision, of vision_transformer).
_NUMBERS = (
    ("MultiHeadDotProductAttention_0", "MultiHeadDotProductAttention_1"),
    ("LayerNorm_1", "LayerNorm_2"),
    ("MlpBlock_0", "MlpBlock_3"),
)
_POSITIONS = "Transformer/posembed_input/pos_embedding"


def heads_of(tensors: Mapping[str, torch.Tensor]) -> int | None:
    """Attention heads, which only Google's shapes show: kernels are [width, heads, head width]."""
    query = re.compile(r"Transformer/encoderblock_\d+/MultiHeadDotProductAttention_0/query/kernel")
    for name, tensor in _unstacked(tensors).items():
        if query.fullmatch(_as_big_vision(name)) and tensor.ndim == 3:
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


def _as_big_vision(name: str) -> str:
    """The name in the table."""
    if re.fullmatch(r"(Transformer/)?(posembed_input/)?pos_embedding", name):
        return "pos_embedding"
    if name.startswith("Transformer/encoderblock_"):
        for here, there in _NUMBERS:
            name = name.replace(f"/{there}/", f"/{here}/")
    return name


def _as_vision_transformer(name: str) -> str:
    if name == "pos_embedding":
        return _POSITIONS
    if name.startswith("Transformer/encoderblock_"):
        for here, there in _NUMBERS:
            name = name.replace(f"/{here}/", f"/{there}/")
    return name


def _translated(name: str, source: str, target: str) -> str | None:
    """A name that one template matches, written by the other."""
    match = _pattern(source).fullmatch(name)
    return None if match is None else target.format(*match.groups())


@cache
def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(r"(\d+)".join(map(re.escape, template.split("{}"))))


def _tensors() -> Iterator[tuple[str, str, _Value]]:
    """(their template, ours, the tensor)."""
    for theirs, ours, values in VIT:
        for value in values:
            yield theirs + value.theirs, ours + value.ours, value


def renamed(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Under our names; what has none keeps its own, for the table of what does not fit."""
    return joined(dict(_read(name, tensor) for name, tensor in _unstacked(tensors).items()))


def _read(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    known = _as_big_vision(name)
    for theirs, ours, value in _tensors():
        if tensor.ndim in value.num_dims:
            found = _translated(known, theirs, ours)
            if found is not None:
                return found, value.read(tensor).contiguous()
    return name, tensor


Named = tuple[str, torch.Tensor]


def written(
    weights: Mapping[str, torch.Tensor], *, num_heads: int, is_big_vision: bool
) -> dict[str, Named | None]:
    """Our name, Q, K and V split -> their name and tensor; None where their code has no module.

    is_big_vision: else of vision_transformer.
    """
    change = "params/{}".format if is_big_vision else _as_vision_transformer
    found: dict[str, Named | None] = {}
    for name, tensor in split(weights).items():
        named = _written(name, tensor, num_heads=num_heads)
        found[name] = named and (change(named[0]), named[1])
    return found


def _written(name: str, tensor: torch.Tensor, *, num_heads: int) -> Named | None:
    # A head with a hidden layer.
    name = name.replace("head.0.", "pre_logits.").replace("head.2.", "head.")
    for theirs, ours, value in _tensors():
        found = _translated(name, ours, theirs)
        if found is not None:
            return found, value.write(tensor, num_heads)
    return None
