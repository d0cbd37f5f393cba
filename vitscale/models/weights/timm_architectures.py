"""Our models in timm: which of its functions builds one, with which arguments and weights.

Leaves out: files (`timm_folders`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vitscale.models.interface.architecture import Architecture
from vitscale.models.resnet.units import DEPTHS, ROOT_WIDTH
from vitscale.models.vit.settings import TransformerSettings

# Of timm's layer norms; it has no option for another.
NORM_EPS = 1e-6
POOLS = {"cls": "token", "gap": "avg", "map": "map"}
# timm fixes the units and widths of a hybrid's stem by function, and those of BiT.
HYBRIDS: dict[tuple[int, ...], str] = {
    (): "vit_tiny_r_s16_p8_224",
    (2, 2, 2, 2): "vit_small_r26_s32_224",
    (3, 4, 9): "vit_base_r50_s16_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
}
BITS = {
    (DEPTHS[depth], ROOT_WIDTH * width): f"resnetv2_{depth[1:]}x{width}_bit"
    for depth, width in (
        *(("R50", 1), ("R50", 3), ("R101", 1), ("R101", 3), ("R152", 2), ("R152", 4)),
    )
}
# Added to the variance of a kernel: by timm, and by big_transfer. Google's hybrids add theirs to
# the deviation.
TIMM_EPS, BIT_EPS, HYBRID_EPS = 1e-8, 1e-10, 1e-5


@dataclass(frozen=True, kw_only=True)
class TimmArchitecture:
    """How `timm.create_model` builds a model."""

    name: str
    arguments: dict[str, Any]
    first_conv: str
    classifier: str | list[str]
    fixed_input_size: bool = True
    """Whether the model is built for one image size."""


def architecture_problems(settings: Any, arch: Architecture) -> Iterator[str]:
    """What the model has that no function of timm builds."""
    if isinstance(settings, TransformerSettings):
        yield from _transformer_problems(settings, arch)
        return
    sizes: Any = arch
    if (tuple(sizes.stage_depths), sizes.root_width) not in BITS:
        yield _no_resnet(sizes, allowed=", ".join(name for name in BITS.values()))


def _transformer_problems(settings: TransformerSettings, arch: Any) -> Iterator[str]:
    if settings.pool not in POOLS:
        yield f"pool={settings.pool}"
    if settings.representation_layer:
        yield "a representation layer"
    if settings.layer_norm_eps != NORM_EPS:
        yield f"layer_norm_eps {settings.layer_norm_eps:g} (timm has {NORM_EPS:g})"
    if arch.attention_width != arch.width:
        yield "attention heads of a width of their own"
    if settings.distillation_token and settings.mlp != "gelu":
        yield f"a distillation token beside mlp={settings.mlp}"
    if settings.name != "hybrid":
        return
    if tuple(arch.stage_depths) not in HYBRIDS or arch.root_width != ROOT_WIDTH:
        allowed = ", ".join(str(list(depths)) for depths in HYBRIDS)
        yield _no_resnet(arch, allowed=f"{ROOT_WIDTH} channels and {allowed}")
    if settings.distillation_token or settings.mlp != "gelu":
        yield "a distillation token or SwiGLU beside a ResNet"


def _no_resnet(arch: Any, *, allowed: str) -> str:
    depths = list(arch.stage_depths)
    return f"a ResNet of {depths} units with {arch.root_width} channels (timm has {allowed})"


def timm_architecture(settings: Any, arch: Any) -> TimmArchitecture:
    """Of a model without `architecture_problems`."""
    if not isinstance(settings, TransformerSettings):
        name = BITS[tuple(arch.stage_depths), arch.root_width]
        return TimmArchitecture(
            name=name,
            arguments={},
            first_conv="stem.conv",
            classifier="head.fc",
            fixed_input_size=False,
        )
    is_gated = arch.mlp == "swiglu"
    arguments: dict[str, Any] = {
        "img_size": arch.image_size,
        "patch_size": arch.patch_size,
        "embed_dim": arch.width,
        "depth": arch.depth,
        "num_heads": arch.num_heads,
        # timm counts gates as hidden channels.
        "mlp_ratio": (2 if is_gated else 1) * arch.mlp_ratio,
        "act_layer": "silu" if is_gated else "gelu_tanh" if settings.gelu == "tanh" else "gelu",
        "global_pool": POOLS[arch.pool],
        "class_token": arch.has_class_token,
        "reg_tokens": arch.num_registers,
        "no_embed_class": not arch.class_position,
        "init_values": settings.layer_scale,
        "fc_norm": arch.pool_norm,
        "final_norm": True,
    }
    # The functions' own sizes are replaced by the arguments.
    name, first_conv = "vit_base_patch16_224", "patch_embed.proj"
    if arch.distillation_token:
        name = "deit_base_distilled_patch16_224"
    elif settings.name == "hybrid":
        name = HYBRIDS[tuple(arch.stage_depths)]
        root = "backbone.stem" if arch.stage_depths else "backbone"
        first_conv = f"patch_embed.{root}.conv"
    elif is_gated:
        name = "vit_giant_patch14_dinov2"
    return TimmArchitecture(
        name=name,
        arguments=arguments,
        first_conv=first_conv,
        classifier=["head", "head_dist"] if arch.distillation_token else "head",
    )


def timm_weights(
    weights: Mapping[str, torch.Tensor], arch: Architecture
) -> dict[str, torch.Tensor]:
    """Weights with which timm's model gives our model's output.

    Standardised kernels are scaled: their scale only matters through the epsilon, which is another
    in timm.
    """
    if arch.name not in ("hybrid", "bit_resnet"):
        return dict(weights)
    return {
        name: _scaled(value, family=arch.name) if _is_standardised(name, value) else value
        for name, value in weights.items()
    }


def _is_standardised(name: str, value: torch.Tensor) -> bool:
    is_other = name == "patch_embed.proj.weight" or name.startswith("head.")
    return value.ndim == 4 and not is_other


def _scaled(kernel_OIHW: torch.Tensor, *, family: str) -> torch.Tensor:
    """Per output channel, so that var / (var + `TIMM_EPS`) is the variance after our epsilon."""
    if family == "bit_resnet":
        return kernel_OIHW * (TIMM_EPS / BIT_EPS) ** 0.5
    kernel = kernel_OIHW.double()
    deviation, mean = torch.std_mean(kernel, dim=(1, 2, 3), keepdim=True, correction=0)
    ratio = deviation / (deviation + HYBRID_EPS)
    wanted = ratio * (TIMM_EPS / (1 - ratio**2)).sqrt()
    return torch.where(deviation > 0, (kernel - mean) / deviation * wanted, 0).float()
