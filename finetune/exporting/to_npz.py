"""Export under Google's names: one .npz of vision_transformer, big_vision or big_transfer.

Owns: our names and shapes -> theirs. Leaves out: the opposite direction (`names.google`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from finetune.exporting.format import Format, logits_read_back, write_description
from finetune.loading.loaded_model import LoadedModel
from vitscale.models.weights.names.fused_qkv import split

WEIGHTS_NAME = "model.npz"
# Of vision_transformer and of big_vision: how the modules of a block are numbered.
ORIGINAL = {"attention": "1", "norm2": "2", "mlp": "3"}
BIG_VISION = {"attention": "0", "norm2": "1", "mlp": "0"}
STEM = r"patch_embed\.backbone\."
UNIT = r"stages\.(\d+)\.blocks\.(\d+)\."
HYBRID_PARTS = {
    "conv1": "conv1",
    "conv2": "conv2",
    "conv3": "conv3",
    "downsample.conv": "conv_proj",
    "norm1": "gn1",
    "norm2": "gn2",
    "norm3": "gn3",
    "downsample.norm": "gn_proj",
}
BIT_PARTS = {
    "conv1": "a/standardized_conv2d",
    "conv2": "b/standardized_conv2d",
    "conv3": "c/standardized_conv2d",
    "downsample.conv": "a/proj/standardized_conv2d",
    "norm1": "a/group_norm",
    "norm2": "b/group_norm",
    "norm3": "c/group_norm",
}


class NpzFormat(Format):
    library = "vitscale"

    def problems(self, loaded: LoadedModel) -> Iterator[str]:
        settings: Any = loaded.settings
        unnamed = [ours for ours, theirs in _google_names(loaded).items() if theirs is None]
        if unnamed:
            yield f"tensors without a name there: {', '.join(sorted(unnamed)[:3])}"
        if settings.name == "bit_resnet":
            return
        if settings.pool not in ("cls", "gap"):
            yield f"pool={settings.pool}"
        if settings.mlp != "gelu":
            yield f"mlp={settings.mlp}"
        if settings.pool == "gap" and settings.class_token:
            yield "a class token that no head reads"

    def notes(self, loaded: LoadedModel) -> Iterator[str]:
        if getattr(loaded.settings, "gelu", "tanh") == "erf":
            yield "**The model has GELU with erf; Google's code computes it with tanh.**"

    def write(self, loaded: LoadedModel, folder: Path) -> None:
        arrays = google_arrays(loaded)
        # Sorted, so that equal weights give equal bytes.
        np.savez(folder / WEIGHTS_NAME, **{name: arrays[name] for name in sorted(arrays)})  # type: ignore[arg-type]  # names are no options
        write_description(loaded, folder)

    def logits(
        self, loaded: LoadedModel, folder: Path, images_B3HW: torch.Tensor
    ) -> torch.Tensor | None:
        return logits_read_back(loaded, folder / WEIGHTS_NAME, images_B3HW)

    def usage(self, loaded: LoadedModel) -> str:
        return 'import numpy\nweights = dict(numpy.load("FOLDER/model.npz"))'


def google_arrays(loaded: LoadedModel) -> dict[str, np.ndarray]:
    """The weights as Google's code names and shapes them. Raises KeyError as `_google_names`."""
    weights = split(loaded.network.state_dict())
    num_heads = getattr(loaded.arch, "num_heads", 1)
    found = {}
    for ours, theirs in _google_names(loaded).items():
        assert theirs is not None, ours
        found[theirs] = _shaped(theirs, weights[ours], num_heads=num_heads)
    return found


def _shaped(theirs: str, tensor: torch.Tensor, *, num_heads: int) -> np.ndarray:
    """Kernels as [in, out], of convolutions as [H, W, in, out], of attention with a head axis."""
    if "MultiHeadDotProductAttention" in theirs:
        if theirs.endswith("out/kernel"):
            tensor = tensor.T.unflatten(0, (num_heads, -1))  # [heads, head width, width]
        elif theirs.endswith("kernel"):
            tensor = tensor.T.unflatten(1, (num_heads, -1))  # [width, heads, head width]
        elif not theirs.endswith("out/bias"):
            tensor = tensor.unflatten(0, (num_heads, -1))
    elif theirs.endswith("kernel"):
        tensor = tensor.permute(2, 3, 1, 0) if tensor.ndim == 4 else tensor.T
    return np.ascontiguousarray(tensor.float().numpy())


def _google_names(loaded: LoadedModel) -> dict[str, str | None]:
    """Our name (Q, K and V split) -> Google's; None for what their code has no module for."""
    names = split(loaded.network.state_dict())
    if loaded.arch.name == "bit_resnet":
        return {name: _bit_name(name) for name in names}
    arch: Any = loaded.arch
    # vision_transformer adds a position to the class token; big_vision does not.
    original = arch.pool == "gap" or arch.class_position
    prefix = "" if original else "params/"
    theirs = {name: _vit_name(name, original=original) for name in names}
    return {name: None if known is None else prefix + known for name, known in theirs.items()}


def _vit_name(name: str, *, original: bool) -> str | None:
    exact = {
        "cls_token": "cls",
        "pos_embed": f"{'Transformer/posembed_input/' if original else ''}pos_embedding",
        "patch_embed.proj.weight": "embedding/kernel",
        "patch_embed.proj.bias": "embedding/bias",
        "norm.weight": "Transformer/encoder_norm/scale",
        "norm.bias": "Transformer/encoder_norm/bias",
        "head.0.weight": "pre_logits/kernel",
        "head.0.bias": "pre_logits/bias",
        "head.2.weight": "head/kernel",
        "head.2.bias": "head/bias",
        "head.weight": "head/kernel",
        "head.bias": "head/bias",
    }
    if name in exact:
        return exact[name]
    block = re.fullmatch(r"blocks\.(\d+)\.(.+)\.(weight|bias)", name)
    if block is not None:
        part = _block_part(block[2], ORIGINAL if original else BIG_VISION)
        kind = _kind(block[3], is_norm=block[2].startswith("norm"))
        return None if part is None else f"Transformer/encoderblock_{block[1]}/{part}/{kind}"
    root = re.fullmatch(STEM + r"(?:stem\.)?(conv|norm)\.(weight|bias)", name)
    if root is not None:
        module = "conv_root" if root[1] == "conv" else "gn_root"
        return f"{module}/{_kind(root[2], is_norm=root[1] == 'norm')}"
    unit = re.fullmatch(STEM + UNIT + r"(.+)\.(weight|bias)", name)
    if unit is None or unit[3] not in HYBRID_PARTS:
        return None
    kind = _kind(unit[4], is_norm="norm" in unit[3])
    return f"block{int(unit[1]) + 1}/unit{int(unit[2]) + 1}/{HYBRID_PARTS[unit[3]]}/{kind}"


def _block_part(ours: str, number: Mapping[str, str]) -> str | None:
    attention = f"MultiHeadDotProductAttention_{number['attention']}"
    return {
        "norm1": "LayerNorm_0",
        "norm2": f"LayerNorm_{number['norm2']}",
        "attn.query": f"{attention}/query",
        "attn.key": f"{attention}/key",
        "attn.value": f"{attention}/value",
        "attn.proj": f"{attention}/out",
        "mlp.fc1": f"MlpBlock_{number['mlp']}/Dense_0",
        "mlp.fc2": f"MlpBlock_{number['mlp']}/Dense_1",
    }.get(ours)


def _kind(ours: str, *, is_norm: bool) -> str:
    return "bias" if ours == "bias" else "scale" if is_norm else "kernel"


def _bit_name(name: str) -> str | None:
    exact = {
        "stem.conv.weight": "resnet/root_block/standardized_conv2d/kernel",
        "norm.weight": "resnet/group_norm/gamma",
        "norm.bias": "resnet/group_norm/beta",
        "head.fc.weight": "resnet/head/conv2d/kernel",
        "head.fc.bias": "resnet/head/conv2d/bias",
    }
    unit = re.fullmatch(UNIT + r"(.+)\.(weight|bias)", name)
    if unit is None or unit[3] not in BIT_PARTS:
        return exact.get(name)
    kind = "beta" if unit[4] == "bias" else "gamma" if "norm" in unit[3] else "kernel"
    return f"resnet/block{int(unit[1]) + 1}/unit{int(unit[2]) + 1:02d}/{BIT_PARTS[unit[3]]}/{kind}"
