"""Costs of a model, by formula: parameters, FLOPs, activations, and memory after ZeRO.

Needs no torch. Leaves out: models of timm, which are counted when built, and measuring.

Legend: d width, a width of all heads together (d unless heads have a width of their own), m MLP
width, T tokens, N patches, p patch size, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vitscale.models.settings import Architecture, ViTSettings

ACTIVATION_SCALE = {"bf16": 1, "fp16": 1, "fp32": 2}


def num_parameters(arch: ViTSettings) -> int:
    """Exact count: biases everywhere, two norms per block; fixed positions are no parameters.

    Source: Dosovitskiy et al. 2021, section 3.1; ViT-B/16 with 1,000 classes has 86,567,656.
    """
    d = arch.width
    m = arch.mlp_width

    # A patch embedding is a dense layer on the values of a patch, with a bias.
    patch = arch.patch_values * d + d
    tokens = arch.num_prefix_tokens * d + arch.num_position_rows * d
    last_norm = 2 * d

    # Every classifier has the same size, and the representation layer comes before one alone.
    classifier = arch.feature_width * arch.num_classes + arch.num_classes
    head = arch.num_classifiers * classifier
    if arch.representation_layer:
        head += d * d + d
    if arch.pool == "map":  # a query, Q, K, V and output, a norm and an MLP
        head += d + 4 * (d * d + d) + 2 * d + (d * m + m) + (m * d + d)
    return patch + tokens + arch.depth * block_parameters(arch) + last_norm + head


def feature_width(arch: ViTSettings) -> int:
    """Width of the pooled features, which a head reads."""
    return arch.feature_width


def block_parameters(arch: ViTSettings) -> int:
    d = arch.width
    a = arch.attention_width
    m = arch.mlp_width
    norms = 2 * (2 * d)
    attention = (3 * d * a + 3 * a) + (a * d + d)
    mlp = (d * m + m) + (m * d + d)
    if arch.mlp == "swiglu":  # gates beside the values
        mlp += d * m + m
    block = norms + attention + mlp
    if arch.layer_scale:
        block += 2 * d
    return block


def train_flops_per_image(arch: ViTSettings, *, num_tokens: int | None = None) -> int:
    """Model FLOPs of one training step per image: three forward passes, no recomputation.

    Forward multiply-adds: depth * (T * (4da + 2dm) + 2T^2 a) + 3Np^2 d + dC, two FLOPs each; the
    backward pass counts twice the forward (PaLM, Chowdhery et al. 2022, appendix B). Norms,
    softmax and GELU are left out. For a = d, m = 4d the first term is the familiar 12 T d^2.

    num_tokens: T where the blocks see fewer than all tokens, after all N patches are embedded.
    """
    d = arch.width
    patch = arch.num_patches * arch.patch_values * d
    head = arch.num_classifiers * arch.feature_width * arch.num_classes
    if arch.representation_layer:
        head += d * d
    if arch.pool == "map":  # one query attends to the patches
        num_seen = (num_tokens or arch.num_tokens) - arch.num_prefix_tokens
        head += num_seen * (2 * d * d + 2 * d) + 2 * d * d + 2 * d * arch.mlp_width

    # The embedding and the head see an image once, the blocks one after another.
    return 3 * 2 * (arch.depth * block_multiply_adds(arch, num_tokens) + patch + head)


def block_multiply_adds(arch: ViTSettings, num_tokens: int | None = None) -> int:
    """Count one block's forward pass; num_tokens: all by default."""
    d = arch.width
    a = arch.attention_width
    num_tokens = num_tokens or arch.num_tokens

    # SwiGLU has a matrix of gates beside the two of the MLP.
    num_matrices = 3 if arch.mlp == "swiglu" else 2
    mlp = num_matrices * d * arch.mlp_width
    return num_tokens * (4 * d * a + mlp) + 2 * num_tokens**2 * a


def activation_bytes_per_image(
    arch: ViTSettings,
    *,
    precision: str,
    activation_checkpointing: bool,
    num_tokens: int | None = None,
) -> int:
    """Activations kept for the backward pass of one image, without the T x T attention matrix.

    32 bytes per token and channel of a block in bf16 for m = 4d, here split into 8d + 8a + 4m:
    Korthikanti et al. 2022 (Reducing Activation Recomputation), table 2, without the 5aT^2 term
    that a fused attention kernel never stores; two masks of dropout add 2d. SwiGLU keeps 8m.
    Beside the blocks: the normalised pixels, the input of the last norm, and the gradients of an
    MLP, since the peak is in the first block of the backward pass. Checkpointing keeps each
    block's input and one block in full. num_tokens: that the blocks see, all by default.
    """
    num_tokens = num_tokens or arch.num_tokens
    mlp = 4 * arch.mlp_width
    if arch.mlp == "swiglu":
        mlp *= 2
    channels = 8 * arch.width + 8 * arch.attention_width + mlp
    if arch.dropout:
        channels += 2 * arch.width
    block = num_tokens * channels
    total = arch.depth * block

    # The backward pass recomputes one block after another from its input.
    if activation_checkpointing:
        total = arch.depth * num_tokens * 2 * arch.width + block
    pixels = 3 * arch.num_patches * arch.patch_size**2
    total += 2 * pixels + num_tokens * (2 * arch.width + mlp // 2 + 2 * arch.width)
    return total * ACTIVATION_SCALE[precision]


# ---- memory of one rank -------------------------------------------------------------------------

# Elements that ZeRO 3 gathers ahead (DeepSpeed's stage3_prefetch_bucket_size).
GATHERED_AHEAD = 50_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes on one rank. Without allocator slack, NCCL's buffers and the CUDA context."""

    parameters: int
    """Trained and frozen ones."""
    gradients: int
    """Includes one bucket that is being reduced."""
    optimizer: int
    """fp32 master weights and optimiser states."""
    activations: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations


def memory_estimate(
    arch: Architecture,
    *,
    costs: Any,
    zero_stage: int,
    world_size: int,
    precision: str,
    micro_batch: int,
    activation_checkpointing: bool,
    optimizer_bytes: int,
    bucket_elements: int = 0,
) -> MemoryEstimate:
    """Bytes one rank needs at its peak: model states after ZeRO plus activations.

    optimizer_bytes: per parameter (`OptimSettings.state_bytes_per_parameter`).
    bucket_elements: of a gradient bucket.
    costs: `costs_of(arch)`, or an objective that adds to the model.
    ZeRO stage 1 spreads master weights and optimiser states over the ranks, stage 2 gradients too,
    stage 3 everything: Rajbhandari et al. 2020 (ZeRO), section 3.1 and figure 1.
    """
    # One fp32 rank runs without stages 1 and 2: there is nothing to shard.
    if precision == "fp32" and world_size == 1 and zero_stage < 3:
        zero_stage = 0

    # Stage 0 computes in bf16 by autocast, from fp32 weights.
    is_low = precision != "fp32" and zero_stage > 0
    weight_bytes = 2 if is_low else 4

    # ZeRO keeps an fp32 copy of the part that a rank updates; at stage 1 in fp32 that copy is the
    # weights themselves.
    master_bytes = 4 if is_low or zero_stage >= 2 else 0

    def on_one_rank(total: int, *, sharded_from: int) -> int:
        """The rank with the most: shares are rounded up."""
        num_ranks = world_size if zero_stage >= sharded_from else 1
        return -(-total // num_ranks)

    count = costs.num_parameters(arch)
    parameters = on_one_rank(count * weight_bytes, sharded_from=3)
    if hasattr(costs, "teacher_parameters"):
        # Whole on every rank, in the precision of the forward pass.
        teacher_bytes = 4 if precision == "fp32" else 2
        parameters += costs.teacher_parameters(arch) * teacher_bytes
    if zero_stage == 3:
        parameters += weight_bytes * min(count, GATHERED_AHEAD)
    if is_low:
        # Every rank has all of what rounding took from the last layer.
        parameters += 2 * arch.num_classes * (arch.feature_width + 1)
    elif precision != "fp32":
        # Autocast's copy.
        parameters += 2 * count
    if zero_stage == 1 and is_low:
        # Micro-batches are summed in fp32, beside the gradients of the last one.
        parameters += 2 * count

    optimizer = count * (master_bytes + optimizer_bytes)
    activations = micro_batch * costs.activation_bytes_per_image(
        arch, precision=precision, activation_checkpointing=activation_checkpointing
    )
    if hasattr(costs, "loss_bytes"):
        activations += costs.loss_bytes(
            arch, precision=precision, micro_batch=micro_batch
        )
    return MemoryEstimate(
        parameters=parameters,
        gradients=4 * on_one_rank(count, sharded_from=2)
        + weight_bytes * bucket_elements,
        optimizer=on_one_rank(optimizer, sharded_from=1),
        activations=activations,
    )
