"""Hugging Face's names of tensors in files, and ours: ViT, DeiT, MAE and DINOv2.

Owns: one table that is read both ways. Leaves out: files and config.json (`folders`).

transformers renames tensors in memory (from 5.0 on); these are the names that it writes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from vitscale.models.weights.names.fused_qkv import joined, split

# (theirs, ours); N is the number of a block. Names of tensors, or of modules with weight and bias.
_EMBEDDINGS = (
    ("embeddings.cls_token", "cls_token"),
    ("embeddings.position_embeddings", "pos_embed"),
    ("embeddings.patch_embeddings.projection", "patch_embed.proj"),
    ("layernorm", "norm"),
)
_BLOCK = (
    ("encoder.layer.N.attention.attention.query", "blocks.N.attn.query"),
    ("encoder.layer.N.attention.attention.key", "blocks.N.attn.key"),
    ("encoder.layer.N.attention.attention.value", "blocks.N.attn.value"),
    ("encoder.layer.N.attention.output.dense", "blocks.N.attn.proj"),
)
_VIT = (
    *_EMBEDDINGS,
    *_BLOCK,
    ("encoder.layer.N.layernorm_before", "blocks.N.norm1"),
    ("encoder.layer.N.layernorm_after", "blocks.N.norm2"),
    ("encoder.layer.N.intermediate.dense", "blocks.N.mlp.fc1"),
    ("encoder.layer.N.output.dense", "blocks.N.mlp.fc2"),
)
_DINOV2 = (
    *_EMBEDDINGS,
    *_BLOCK,
    ("encoder.layer.N.norm1", "blocks.N.norm1"),
    ("encoder.layer.N.norm2", "blocks.N.norm2"),
    ("encoder.layer.N.layer_scale1.lambda1", "blocks.N.ls1.gamma"),
    ("encoder.layer.N.layer_scale2.lambda1", "blocks.N.ls2.gamma"),
    ("encoder.layer.N.mlp.fc1", "blocks.N.mlp.fc1"),
    ("encoder.layer.N.mlp.fc2", "blocks.N.mlp.fc2"),
    # SwiGLU, in DINOv2's g/14.
    ("encoder.layer.N.mlp.weights_in", "blocks.N.mlp.fc1"),
    ("encoder.layer.N.mlp.weights_out", "blocks.N.mlp.fc2"),
)
# model_type of config.json: (prefix of the trunk, names below it, names without the prefix).
FAMILIES: dict[str, tuple[str, tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]] = {
    "vit": ("vit.", _VIT, (("classifier", "head"),)),
    "vit_mae": ("vit.", _VIT, ()),
    "deit": (
        "deit.",
        (*_VIT, ("embeddings.distillation_token", "dist_token")),
        (
            ("cls_classifier", "head"),
            ("distillation_classifier", "head_dist"),
            ("classifier", "head"),
        ),
    ),
    "dinov2": ("dinov2.", _DINOV2, (("classifier", "head"),)),
    "dinov2_with_registers": (
        "dinov2_with_registers.",
        (*_DINOV2, ("embeddings.register_tokens", "reg_token")),
        (("classifier", "head"),),
    ),
}
# Not of the trunk or its classifier: the pooler of plain models, the token for masked patches, the
# decoder of MAE.
UNUSED = ("pooler.", "embeddings.mask_token", "decoder.")


def from_huggingface(
    tensors: Mapping[str, torch.Tensor], model_type: str
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The tensors under our names, and the names that are left out.

    Q, K and V are joined. What has no name here keeps its own, for the table of what does not fit.
    Raises KeyError for a model type that is not in `FAMILIES`.
    """
    prefix, below, beside = FAMILIES[model_type]
    renames = [(_pattern(theirs), ours) for theirs, ours in (*below, *beside)]
    found: dict[str, torch.Tensor] = {}
    left_out = []
    for name, tensor in tensors.items():
        bare = name.removeprefix(prefix)
        if bare.startswith(UNUSED):
            left_out.append(name)
            continue
        for pattern, ours in renames:
            match = pattern.fullmatch(bare)
            if match is not None:
                bare = ours.replace("N", match["N"] if "N" in ours else "") + match["part"]
                break
        found[bare] = tensor
    return joined(found), left_out


def to_huggingface(
    weights: Mapping[str, torch.Tensor], model_type: str, *, gated: bool = False
) -> dict[str, torch.Tensor]:
    """Our tensors under the names that transformers reads; the inverse of `from_huggingface`.

    gated: the MLPs are SwiGLU. What has no name there keeps its own. Raises KeyError as
    `from_huggingface`.
    """
    prefix, below, beside = FAMILIES[model_type]
    if gated:
        below = tuple(pair for pair in below if ".mlp.fc" not in pair[0])
    # The first name wins where two have the same meaning.
    renames = [
        *((_pattern(ours), prefix + theirs) for theirs, ours in below),
        *((_pattern(ours), theirs) for theirs, ours in beside),
    ]
    found: dict[str, torch.Tensor] = {}
    for name, tensor in split(weights).items():
        for pattern, theirs in renames:
            match = pattern.fullmatch(name)
            if match is not None:
                name = theirs.replace("N", match["N"] if "N" in theirs else "") + match["part"]
                break
        found[name] = tensor
    return found


def _pattern(name: str) -> re.Pattern[str]:
    """Of a tensor, or of the weight and bias of a module."""
    block = re.escape(name).replace("N", r"(?P<N>\d+)")
    return re.compile(block + r"(?P<part>\.weight|\.bias|)")
