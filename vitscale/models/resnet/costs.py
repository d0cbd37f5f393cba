"""Parameters, FLOPs and activations of residual networks, by formula. Needs no torch.

The same for the stem of a hybrid, whose units normalise after their convolutions, and for BiT,
whose units normalise before them (`preact`).
"""

from __future__ import annotations

from vitscale.models.resnet.architecture import ResNetArchitecture
from vitscale.models.resnet.units import Shape, Unit, area, halved, root_convolution, units

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
POOL_INDEX_BYTES = 8


def trunk_parameters(stage_depths: tuple[int, ...], *, root_width: int, preact: bool) -> int:
    """Exact count without a head: kernels, and two values per channel of each norm."""
    every = list(units(stage_depths, root_width=root_width, image_shape=(1, 1)))
    root = root_convolution(root_width, (1, 1)).num_parameters
    kernels = sum(conv.num_parameters for unit in every for conv in unit.convolutions())
    if preact:
        channels = sum(unit.inputs + 2 * unit.middle for unit in every)
        channels += every[-1].outputs if every else root_width
    else:
        channels = root_width
        channels += sum(conv.outputs for unit in every for conv in unit.convolutions())
    return root + kernels + 2 * channels


def trunk_multiply_adds(
    stage_depths: tuple[int, ...], *, root_width: int, image_shape: Shape
) -> int:
    """Of one forward pass, convolutions only."""
    every = units(stage_depths, root_width=root_width, image_shape=image_shape)
    root = root_convolution(root_width, image_shape).multiply_adds
    return root + sum(conv.multiply_adds for unit in every for conv in unit.convolutions())


def trunk_activation_bytes(
    stage_depths: tuple[int, ...],
    *,
    root_width: int,
    image_shape: Shape,
    preact: bool,
    precision: str,
    activation_checkpointing: bool,
) -> int:
    """Activations kept for the backward pass of one image.

    Each norm keeps its input and each activation function its output, which is the next
    convolution's input. Checkpointing keeps each unit's input and one unit in full.
    """
    width = BYTES[precision]
    half = halved(image_shape)
    pooled = root_width * area(halved(half))
    # What is padded is a copy: the input of the pool, and with SAME padding that of convolutions.
    if preact:
        root = 3 * area(image_shape) + root_width * area(half, padding=2)
    else:
        root = 3 * area(image_shape, padding=5)
        root += root_width * (2 * area(half) + area(half, padding=1))
    root = width * (root + pooled) + POOL_INDEX_BYTES * pooled
    every = list(units(stage_depths, root_width=root_width, image_shape=image_shape))
    kept = [width * _unit_values(unit, preact=preact) for unit in every]
    if activation_checkpointing and kept:
        outputs = sum(unit.outputs * area(unit.shape_out) for unit in every)
        return root + width * outputs + max(kept)
    return root + sum(kept)


def _unit_values(unit: Unit, *, preact: bool) -> int:
    """Kept values of a unit, its output included and its input not."""
    values = 2 * unit.middle * (area(unit.shape_in) + area(unit.shape_out))
    output = unit.outputs * area(unit.shape_out)
    if preact:
        return values + output + unit.inputs * area(unit.shape_in)
    if unit.shape_out != unit.shape_in:
        values += unit.middle * area(unit.shape_in, padding=1)
    return values + output * (3 if unit.projects else 2)


def num_parameters(arch: ResNetArchitecture) -> int:
    """Exact count; R50x1 with 1,000 classes has 25,549,352."""
    trunk = trunk_parameters(arch.stage_depths, root_width=arch.root_width, preact=True)
    return trunk + arch.feature_width * arch.num_classes + arch.num_classes


def train_flops_per_image(arch: ResNetArchitecture) -> int:
    """Model FLOPs of one training step per image: three forward passes, no recomputation.

    Two FLOPs for each multiply-add of convolutions and head; the backward pass counts twice the
    forward (PaLM, Chowdhery et al. 2022, appendix B). Norms, activation functions and the
    standardisation of weights are left out.
    """
    trunk = trunk_multiply_adds(
        arch.stage_depths, root_width=arch.root_width, image_shape=arch.image_shape
    )
    return 3 * 2 * (trunk + arch.feature_width * arch.num_classes)


def activation_bytes_per_image(
    arch: ResNetArchitecture, *, precision: str, activation_checkpointing: bool
) -> int:
    """Activations kept for the backward pass of one image."""
    return trunk_activation_bytes(
        arch.stage_depths,
        root_width=arch.root_width,
        image_shape=arch.image_shape,
        preact=True,
        precision=precision,
        activation_checkpointing=activation_checkpointing,
    ) + BYTES[precision] * arch.feature_width * (area(arch.feature_shape) + 1)
