"""Names of tensors in files of PyTorch code bases, and ours, which are timm's.

Owns: prefixes, and what MAE, DeiT, DINO and DINOv2 call differently. Leaves out: reading files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

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


def from_pytorch(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The tensors under our names, and the names that are left out: heads of DINO's training."""
    found = dict(tensors)
    left_out: list[str] = []
    while FIRST_NAME not in found:
        inside = [
            p for p in PREFIXES if any(n.startswith(p) and n.endswith(FIRST_NAME) for n in found)
        ]
        if not inside:
            break
        prefix = inside[0]
        left_out += [name for name in found if not name.startswith(prefix)]
        found = {n.removeprefix(prefix): t for n, t in found.items() if n.startswith(prefix)}
    left_out += [name for name in found if name.startswith(TRAINING_HEADS)]
    kept = {n: t for n, t in found.items() if not n.startswith(TRAINING_HEADS)}
    return {_renamed(name): tensor for name, tensor in kept.items()}, left_out


def with_representation(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The layer before the head and the head itself as one module, which our models have.

    Without a head the layer is of no use, and is left out.
    """
    if not any(name.startswith(REPRESENTATION) for name in weights):
        return dict(weights)
    found = {}
    for name, tensor in weights.items():
        if not name.startswith((REPRESENTATION, "head.")):
            found[name] = tensor
        elif "head.weight" in weights:
            part = name.rpartition(".")[2]
            found[f"head.0.{part}" if name.startswith(REPRESENTATION) else f"head.2.{part}"] = (
                tensor
            )
    return found


def _renamed(name: str) -> str:
    for pattern, ours in RENAMED:
        name = re.sub(rf"^{pattern}$", ours, name)
    return name
