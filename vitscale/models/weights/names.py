"""Our names of tensors, which are timm's, and those of other PyTorch code bases."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

Tensors = dict[str, torch.Tensor]

# Every file of a model has it.
FIRST_NAME = "patch_embed.proj.weight"
# Around the model: DistributedDataParallel's, DINO's and DINOv2's, transformers' for timm's models.
PREFIXES = ("module.", "teacher.", "backbone.", "model.", "timm_model.")
# What DINO and DINOv2 train beside their backbone.
TRAINING_HEADS = ("head.mlp.", "head.last_layer.", "dino_head.", "ibot_head.")
RENAMED = (
    # DeiT's own names (models_v2.py) of what timm calls layer scale.
    (r"(blocks\.\d+)\.gamma_([12])", r"\1.ls\2.gamma"),
    # DINOv2 trains with its blocks in chunks, each numbered on: blocks.CHUNK.BLOCK.
    (r"blocks\.\d+\.(\d+)\.((?:norm|attn|mlp|ls)\d?\..*)", r"blocks.\1.\2"),
    (r"register_tokens", "reg_token"),
    # SwiGLU of DINOv2.
    (r"(blocks\.\d+)\.mlp\.w12\.(.*)", r"\1.mlp.fc1.\2"),
    (r"(blocks\.\d+)\.mlp\.w3\.(.*)", r"\1.mlp.fc2.\2"),
    # Flax's name of the representation layer.
    (r"pre_logits\.fc\.(.*)", r"pre_logits.\1"),
)
REPRESENTATION = "pre_logits."
# (where the parts are, their names, the name of all): of a block, and of a pooling head (MAP).
FUSED = (
    (r"blocks\.\d+\.attn", ("query", "key", "value"), "qkv"),
    (r"attn_pool", ("key", "value"), "kv"),
)


def from_pytorch(tensors: Tensors) -> tuple[Tensors, list[str]]:
    """The tensors under our names, and the names that are left out: heads of DINO's training."""
    found, left_out = dict(tensors), []
    while FIRST_NAME not in found:
        inside = [
            p
            for p in PREFIXES
            if any(n.startswith(p) and n.endswith(FIRST_NAME) for n in found)
        ]
        if not inside:
            break
        prefix = inside[0]
        left_out += [name for name in found if not name.startswith(prefix)]
        found = {
            n.removeprefix(prefix): t for n, t in found.items() if n.startswith(prefix)
        }
    left_out += [name for name in found if name.startswith(TRAINING_HEADS)]
    kept = {}
    for name, tensor in found.items():
        if not name.startswith(TRAINING_HEADS):
            for pattern, ours in RENAMED:
                name = re.sub(rf"^{pattern}$", ours, name)
            kept[name] = tensor
    return kept, left_out


def without_wrappers(tensors: Tensors) -> Tensors:
    """The tensors without the prefixes that all names have, such as DistributedDataParallel's."""
    found = dict(tensors)
    while prefix := next(
        (p for p in PREFIXES if all(n.startswith(p) for n in found)), None
    ):
        if not found:
            break
        found = {name.removeprefix(prefix): tensor for name, tensor in found.items()}
    return found


def with_representation(weights: Tensors) -> Tensors:
    """The layer before the head and the head itself as one module, which our models have.

    Without a head the layer is of no use, and is left out.
    """
    if not any(name.startswith(REPRESENTATION) for name in weights):
        return weights
    layers = {REPRESENTATION: "head.0.", "head.": "head.2."}
    found = {}
    for name, tensor in weights.items():
        layer = next(filter(name.startswith, layers), None)
        if layer is None:
            found[name] = tensor
        elif "head.weight" in weights:
            found[layers[layer] + name.removeprefix(layer)] = tensor
    return found


def numbered(name: str) -> tuple[str, str]:
    """A name with {} for the number of its block, as tables have it, and the number."""
    match = re.search(r"(?:encoderblock_|layer\.|blocks\.)(\d+)(?=[./])", name)
    if match is None:
        return name, ""
    return f"{name[: match.start(1)]}{{}}{name[match.end(1) :]}", match[1]


def joined(weights: Mapping[str, torch.Tensor]) -> Tensors:
    """`attn.query`, `.key` and `.value` as one `attn.qkv`, where all three are of one shape."""
    found = dict(weights)
    for where, parts, whole in FUSED:
        pattern = re.compile(rf"({where})\.{parts[0]}\.(weight|bias)")
        for match in filter(None, map(pattern.fullmatch, weights)):
            names = [f"{match[1]}.{part}.{match[2]}" for part in parts]
            if (
                len(
                    {weights[name].shape if name in weights else None for name in names}
                )
                == 1
            ):
                tensors = [found.pop(name) for name in names]
                found[f"{match[1]}.{whole}.{match[2]}"] = torch.cat(tensors)
    return found


def split(weights: Mapping[str, torch.Tensor]) -> Tensors:
    """The inverse of `joined`."""
    found = dict(weights)
    for where, parts, whole in FUSED:
        pattern = re.compile(rf"({where})\.{whole}\.(weight|bias)")
        for match in filter(None, map(pattern.fullmatch, weights)):
            chunks = found.pop(match[0]).chunk(len(parts))
            for part, values in zip(parts, chunks, strict=True):
                found[f"{match[1]}.{part}.{match[2]}"] = values.contiguous()
    return found
