"""Our names of tensors, which are timm's, and those of other PyTorch code bases."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

import torch

Tensors = dict[str, torch.Tensor]

# Every file of a model has it.
FIRST_NAME = "patch_embed.proj.weight"
# Around the model: DistributedDataParallel's, DINO's and DINOv2's, transformers' for timm's models.
PREFIXES = ("module.", "teacher.", "backbone.", "model.", "timm_model.")
# Modules that DINO and DINOv2 train beside their backbone.
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
    inner = dict(tensors)
    left_out: list[str] = []
    while FIRST_NAME not in inner:
        wrapped = [name for name in inner if name.endswith(FIRST_NAME)]
        prefix = _first_prefix(wrapped)
        if prefix is None:
            break
        # Beside a backbone lies what was trained with it alone.
        left_out += [name for name in inner if not name.startswith(prefix)]
        inner = {
            name.removeprefix(prefix): tensor
            for name, tensor in inner.items()
            if name.startswith(prefix)
        }

    renamed = {}
    for name, tensor in inner.items():
        if name.startswith(TRAINING_HEADS):
            left_out.append(name)
            continue
        for pattern, ours in RENAMED:
            name = re.sub(rf"^{pattern}$", ours, name)
        renamed[name] = tensor
    return renamed, left_out


def _first_prefix(names: Collection[str]) -> str | None:
    """The first of `PREFIXES` that one of the names begins with."""
    for prefix in PREFIXES:
        if any(name.startswith(prefix) for name in names):
            return prefix
    return None


def without_wrappers(tensors: Tensors) -> Tensors:
    """The tensors without the prefixes that all names have, such as DistributedDataParallel's."""
    inner = dict(tensors)
    while inner:
        # One name without the prefix shows that it is a part of the model.
        prefix = _first_prefix(inner)
        if prefix is None or not all(name.startswith(prefix) for name in inner):
            break
        inner = {name.removeprefix(prefix): tensor for name, tensor in inner.items()}
    return inner


def with_representation(weights: Tensors) -> Tensors:
    """The layer before the head and the head itself as one module, which our models have.

    Without a head the layer is of no use, and is left out.
    """
    if not any(name.startswith(REPRESENTATION) for name in weights):
        return weights
    has_head = "head.weight" in weights
    renamed = {}
    for name, tensor in weights.items():
        if name.startswith(REPRESENTATION):
            name = f"head.0.{name.removeprefix(REPRESENTATION)}"
        elif name.startswith("head."):
            name = f"head.2.{name.removeprefix('head.')}"
        if has_head or not name.startswith("head."):
            renamed[name] = tensor
    return renamed


def numbered(name: str) -> tuple[str, str]:
    """A name with {} for the number of its block, as tables have it, and the number."""
    match = re.search(r"(?:encoderblock_|layer\.|blocks\.)(\d+)(?=[./])", name)
    if match is None:
        return name, ""
    return f"{name[: match.start(1)]}{{}}{name[match.end(1) :]}", match[1]


def joined(weights: Mapping[str, torch.Tensor]) -> Tensors:
    """`attn.query`, `.key` and `.value` as one `attn.qkv`, where all three are of one shape."""
    whole = dict(weights)
    for where, parts, fused in FUSED:
        pattern = re.compile(rf"({where})\.{parts[0]}\.(weight|bias)")
        for match in filter(None, map(pattern.fullmatch, weights)):
            names = [f"{match[1]}.{part}.{match[2]}" for part in parts]
            # Otherwise the table of misfits lists them, one by one.
            shapes = {weights[name].shape for name in names if name in weights}
            if all(name in weights for name in names) and len(shapes) == 1:
                tensors = [whole.pop(name) for name in names]
                whole[f"{match[1]}.{fused}.{match[2]}"] = torch.cat(tensors)
    return whole
