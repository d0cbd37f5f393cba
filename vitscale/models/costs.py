"""What an architecture costs: parameters, FLOPs and memory, by formula.

Owns: the memory of model states and optimiser, shown by a dry run. Needs no torch.
Leaves out: the formulas of a model family (`MODELS`), and measuring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from vitscale.models.interface.architecture import Architecture
from vitscale.models.registry import costs_of

# Bytes per parameter: (weights, fp32 master weights) as the engine holds them. bf16 and fp16 keep
# an fp32 copy. With fp32, and at stage 0, which computes in bf16 by autocast, the weights are their
# own masters, except that ZeRO clones the part of them that its rank updates.
WEIGHT_BYTES = {"bf16": (2, 4), "fp16": (2, 4), "fp32": (4, 0)}
ZERO_FP32_CLONE_BYTES = 4
AUTOCAST_COPY_BYTES = 2
# Remainders of the last layer's parameters, whole on every rank, where others are rounded.
HEAD_REMAINDER_BYTES = 2
# Elements that ZeRO 3 gathers ahead (DeepSpeed's stage3_prefetch_bucket_size).
GATHERED_AHEAD = 50_000_000


class Costs(Protocol):
    """What a model costs: a family's formulas, or those of an objective that adds to the model."""

    def num_parameters(self, arch: Architecture, /) -> int: ...

    def train_flops_per_image(self, arch: Architecture, /) -> int: ...

    def activation_bytes_per_image(
        self, arch: Architecture, /, *, precision: str, activation_checkpointing: bool
    ) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes on one rank. Without allocator slack, NCCL's buffers and the CUDA context."""

    parameters: int
    """With those that are not trained."""
    gradients: int
    """With one bucket that is being reduced."""
    optimizer: int
    """fp32 master weights and optimiser states."""
    activations: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations


def num_parameters(arch: Architecture) -> int:
    """Exact count of trained values, without what an objective adds."""
    return int(costs_of(arch).num_parameters(arch))


def train_flops_per_image(arch: Architecture) -> int:
    """Model FLOPs of one training step per image: forward and backward, no recomputation."""
    return int(costs_of(arch).train_flops_per_image(arch))


def memory_estimate(
    arch: Architecture,
    *,
    zero_stage: int,
    world_size: int,
    precision: str,
    micro_batch: int,
    activation_checkpointing: bool,
    optimizer_bytes: int,
    accumulation: int = 1,
    bucket_elements: int = 0,
    costs: Costs | None = None,
    frozen_bytes: int = 0,
) -> MemoryEstimate:
    """Bytes one rank needs at its peak: model states after ZeRO plus activations.

    optimizer_bytes: per parameter (`OptimSettings.state_bytes_per_parameter`).
    accumulation: micro-batches of an update; bucket_elements: of a gradient bucket.
    costs: an objective that adds to the model; None: the model alone.
    frozen_bytes: weights that are not trained, such as a teacher's; no stage shards them.
    ZeRO stage 1 spreads master weights and optimiser states over the ranks, stage 2 gradients too,
    stage 3 everything: Rajbhandari et al. 2020 (ZeRO), section 3.1 and figure 1.
    """
    costs = costs or costs_of(arch)
    count, head = costs.num_parameters(arch), arch.num_classes * (arch.feature_width + 1)
    if precision == "fp32" and world_size == 1 and zero_stage < 3:
        zero_stage = 0  # one fp32 rank runs without stages 1 and 2: there is nothing to shard
    master = WEIGHT_BYTES["fp32" if zero_stage == 0 else precision][1]
    if precision == "fp32" and zero_stage > 0:
        master = ZERO_FP32_CLONE_BYTES
    # The engine sums more than two micro-batches in fp32, and all at stage 0.
    gradient = 2 if precision != "fp32" and zero_stage > 0 and accumulation <= 2 else 4
    gradient_ranks = world_size if zero_stage >= 2 else 1
    return MemoryEstimate(
        parameters=frozen_bytes
        + _weight_bytes(count, head, stage=zero_stage, world_size=world_size, precision=precision),
        gradients=gradient * (-(-count // gradient_ranks) + bucket_elements),
        optimizer=-(-count * (master + optimizer_bytes) // (world_size if zero_stage else 1)),
        activations=micro_batch
        * costs.activation_bytes_per_image(
            arch, precision=precision, activation_checkpointing=activation_checkpointing
        ),
    )


def _weight_bytes(count: int, head: int, *, stage: int, world_size: int, precision: str) -> int:
    """head: elements of the last layer."""
    weight = WEIGHT_BYTES["fp32" if stage == 0 else precision][0]
    whole = -(-count * weight // (world_size if stage == 3 else 1))
    if stage == 3:
        whole += weight * min(count, GATHERED_AHEAD)
    if precision == "fp32":
        return whole
    return whole + (AUTOCAST_COPY_BYTES * count if stage == 0 else HEAD_REMAINDER_BYTES * head)
