"""Parameters, FLOPs and activations of a hybrid: those of its stem and its transformer."""

from __future__ import annotations

from vitscale.models.hybrid.architecture import HybridArchitecture
from vitscale.models.resnet.costs import (
    trunk_activation_bytes,
    trunk_multiply_adds,
    trunk_parameters,
)
from vitscale.models.vit import costs as vit_costs


def num_parameters(arch: HybridArchitecture) -> int:
    """Exact count; R50+B/16 with 1,000 classes at 224 px has 98,659,112."""
    stem = trunk_parameters(arch.stage_depths, root_width=arch.root_width, preact=False)
    return stem + vit_costs.num_parameters(arch)


def train_flops_per_image(arch: HybridArchitecture) -> int:
    """Model FLOPs of one training step per image: three forward passes, no recomputation."""
    stem = trunk_multiply_adds(
        arch.stage_depths, root_width=arch.root_width, image_shape=arch.image_shape
    )
    return 3 * 2 * stem + vit_costs.train_flops_per_image(arch)


def activation_bytes_per_image(
    arch: HybridArchitecture, *, precision: str, activation_checkpointing: bool
) -> int:
    """Activations kept for the backward pass of one image, without the attention matrix."""
    stem = trunk_activation_bytes(
        arch.stage_depths,
        root_width=arch.root_width,
        image_shape=arch.image_shape,
        preact=False,
        precision=precision,
        activation_checkpointing=activation_checkpointing,
    )
    return stem + vit_costs.activation_bytes_per_image(
        arch, precision=precision, activation_checkpointing=activation_checkpointing
    )
