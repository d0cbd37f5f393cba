"""What an architecture costs: parameters, FLOPs and memory, by formula.

Owns: the arithmetic shown by a dry run and used for `perf/mfu`. Needs no torch.
Leaves out: measuring, and building the model (`vit`).

Legend: d width, m MLP width, T tokens, N patches, p patch size, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass

from vitscale.models.settings import Architecture

# Bytes per parameter: (weights, gradients, fp32 master weights) as the engine holds them.
# bf16 keeps an fp32 copy. With fp32 the weights are their own master copy, except that ZeRO
# clones the part of them that its rank updates.
STATE_BYTES = {"bf16": (2, 2, 4), "fp16": (2, 2, 4), "fp32": (4, 4, 0)}
ZERO_FP32_CLONE_BYTES = 4
# What an optimiser keeps per parameter: Adam and LAMB two moments in fp32, SGD one momentum.
OPTIMIZER_BYTES = {"adamw": 8, "sgd": 4, "lamb": 8}
BF16_MOMENTUM_SAVES = 2
ACTIVATION_SCALE = {"bf16": 1, "fp16": 1, "fp32": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes on one rank. Without allocator slack, communication buffers and the CUDA context."""

    parameters: int
    gradients: int
    optimizer: int
    """fp32 master weights and optimiser states."""
    activations: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations


def num_parameters(arch: Architecture) -> int:
    """Exact count: biases everywhere, two norms per block; fixed positions are no parameters.

    Source: Dosovitskiy et al. 2021, section 3.1; ViT-B/16 with 1,000 classes has 86,567,656.
    """
    d, m = arch.width, arch.mlp_width
    patch = 3 * arch.patch_size**2 * d + d
    tokens = arch.num_prefix_tokens * d + arch.num_position_rows * d
    block = 2 * (2 * d) + (3 * d * d + 3 * d) + (d * d + d) + (d * m + m) + (m * d + d)
    block += 2 * d if arch.layer_scale else 0
    representation = d * d + d if arch.representation_layer else 0
    head = d * arch.num_classes + arch.num_classes
    return patch + tokens + arch.depth * block + 2 * d + representation + head


def train_flops_per_image(arch: Architecture) -> int:
    """Model FLOPs of one training step per image: three forward passes, no recomputation.

    Forward multiply-adds: depth * (T * (4d^2 + 2dm) + 2T^2 d) + 3Np^2 d + dC, two FLOPs each; the
    backward pass counts twice the forward (PaLM, Chowdhery et al. 2022, appendix B). Norms,
    softmax and GELU are left out. For m = 4d the first term is the familiar 12 T d^2. T counts
    registers and the patches that patch dropout keeps; all N patches are embedded first.
    """
    d, m, num_tokens = arch.width, arch.mlp_width, arch.num_train_tokens
    block = num_tokens * (4 * d * d + 2 * d * m) + 2 * num_tokens**2 * d
    patch = 3 * arch.num_patches * arch.patch_size**2 * d
    head = d * arch.num_classes + (d * d if arch.representation_layer else 0)
    return 3 * 2 * (arch.depth * block + patch + head)


def activation_bytes_per_image(
    arch: Architecture, *, precision: str, activation_checkpointing: bool
) -> int:
    """Activations kept for the backward pass of one image, without the T x T attention matrix.

    34 bytes per token and channel of a block in bf16 for m = 4d, here split into 18d + 4m:
    Korthikanti et al. 2022 (Reducing Activation Recomputation), table 2, without the 5aT^2 term
    that a fused attention kernel never stores. Checkpointing keeps each block's input and one
    block in full.
    """
    block = arch.num_train_tokens * (18 * arch.width + 4 * arch.mlp_width)
    block_input = arch.num_train_tokens * 2 * arch.width
    if activation_checkpointing:
        total = arch.depth * block_input + block
    else:
        total = arch.depth * block
    return total * ACTIVATION_SCALE[precision]


def memory_estimate(
    arch: Architecture,
    *,
    zero_stage: int,
    world_size: int,
    precision: str,
    micro_batch: int,
    activation_checkpointing: bool,
    optimizer: str = "adamw",
    bf16_momentum: bool = False,
) -> MemoryEstimate:
    """Bytes one rank needs at its peak: model states after ZeRO plus activations.

    With bf16 and Adam 16 bytes per parameter, of which ZeRO stage 1 spreads the 12 of the optimiser
    over the ranks, stage 2 the gradients too, stage 3 everything: Rajbhandari et al. 2020 (ZeRO),
    section 3.1 and figure 1.
    """
    count = num_parameters(arch)
    weight, gradient, master = STATE_BYTES[precision]
    # One rank does in fp32 without stages 1 and 2, which have nothing to spread.
    if precision == "fp32" and (zero_stage == 3 or (zero_stage >= 1 and world_size > 1)):
        master = ZERO_FP32_CLONE_BYTES
    states = master + OPTIMIZER_BYTES[optimizer] - bf16_momentum * BF16_MOMENTUM_SAVES

    def share(total: int, from_stage: int) -> int:
        return -(-total // world_size) if zero_stage >= from_stage else total

    return MemoryEstimate(
        parameters=share(count * weight, 3),
        gradients=share(count * gradient, 2),
        optimizer=share(count * states, 1),
        activations=micro_batch
        * activation_bytes_per_image(
            arch, precision=precision, activation_checkpointing=activation_checkpointing
        ),
    )
