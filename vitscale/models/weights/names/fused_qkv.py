"""Join the matrices of queries, keys and values as timm stores them, and split them again."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

# (where the parts are, their names, the name of all): of a block, and of a pooling head (MAP).
FUSED = (
    (r"blocks\.\d+\.attn", ("query", "key", "value"), "qkv"),
    (r"attn_pool", ("key", "value"), "kv"),
)


def joined(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`attn.query`, `.key` and `.value` as one `attn.qkv`, where all three are of one shape."""
    found = dict(weights)
    for where, parts, whole in FUSED:
        pattern = re.compile(rf"({where})\.{parts[0]}\.(weight|bias)")
        for match in filter(None, map(pattern.fullmatch, weights)):
            names = [f"{match[1]}.{part}.{match[2]}" for part in parts]
            if len({weights[name].shape if name in weights else None for name in names}) == 1:
                tensors = [found.pop(name) for name in names]
                found[f"{match[1]}.{whole}.{match[2]}"] = torch.cat(tensors)
    return found


def split(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of `joined`."""
    found = dict(weights)
    for where, parts, whole in FUSED:
        pattern = re.compile(rf"({where})\.{whole}\.(weight|bias)")
        for match in filter(None, map(pattern.fullmatch, weights)):
            chunks = found.pop(match[0]).chunk(len(parts))
            for part, values in zip(parts, chunks, strict=True):
                found[f"{match[1]}.{part}.{match[2]}"] = values.contiguous()
    return found
