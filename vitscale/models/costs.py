"""What an architecture costs: parameters, FLOPs and memory, by formula.

Owns: the memory of model states and optimiser, shown by a dry run. Needs no torch.
Leaves out: the formulas of each model family (`MODELS`), and measuring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from vitscale.models.interface.architecture import Architecture
from vitscale.models.registry import MODELS

# Bytes per parameter: (weights, fp32 master weights) as the engine holds them. bf16 and fp16 keep
# an fp32 copy. With fp32, and at stage 0, which computes in bf16 by autocast, the weights are their
# own masters, except that ZeRO clones the part of them that its rank updates.
WEIGHT_BYTES = {"bf16": (2, 4), "fp16": (2, 4), "fp32": (4, 0)}
ZERO_FP32_CLONE_BYTES = 4
AUTOCAST_COPY_BYTES = 2
# Remainders of the last layer's parameters, whole on every rank, where others are rounded.
HEAD_REMAINDER_BYTES = 2


class Costs(Protocol):
    """What a model costs: a family's formulas, or those of an objective that adds to the model."""

    def num_parameters(self, arch: Architecture, /) -> int: ...

    def train_flops_per_image(self, arch: Architecture, /) -> int: ...

    def activation_bytes_per_image(
        self, arch: Architecture, /, *, precision: str, activation_checkpointing: bool
    ) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes on one rank. Without allocator slack, communication buffers and the CUDA context."""

    parameters: int
    """With those that are not trained."""
    gradients: int
    """What they add to the peak: an update needs more than the backward pass, but no
    activations."""
    optimizer: int
    """fp32 master weights and optimiser states."""
    activations: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations


def num_parameters(arch: Architecture) -> int:
    """Exact count of trained values, without what an objective adds."""
    return MODELS[arch.name].num_parameters(arch)


def train_flops_per_image(arch: Architecture) -> int:
    """Model FLOPs of one training step per image: forward and backward, no recomputation."""
    return MODELS[arch.name].train_flops_per_image(arch)


def gradient_bytes(
    *,
    zero_stage: int,
    world_size: int,
    precision: str,
    accumulation: int,
    reduces_in_fp32: bool = False,
) -> tuple[float, float]:
    """Bytes per parameter on one rank: (at the end of the backward pass, during the update).

    As DeepSpeed's wrappers hold them (0.19.8; counted by tests/support/engine/gradient_checks.py).
    """
    share = 1 / world_size
    if zero_stage == 0:
        return 4, 4 if world_size == 1 else 8  # all in one buffer, to be averaged
    if precision == "fp32" and zero_stage < 3:
        return (4 if zero_stage == 1 else 8 * share), 8 * share  # a list of slices, and one tensor
    if zero_stage == 1 and precision == "bf16" and accumulation <= 2 and not reduces_in_fp32:
        return 2, 6 * share  # slices in bf16, and one tensor in fp32
    # Sums in fp32: at stage 1 of whole gradients, which are then reduced; at stages 2 and 3 of what
    # this rank owns.
    return (4 if zero_stage == 1 else 0) + 4 * share, 4 * share


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
    reduces_in_fp32: bool = False,
    costs: Costs | None = None,
    frozen_bytes: int = 0,
) -> MemoryEstimate:
    """Bytes one rank needs at its peak: model states after ZeRO plus activations.

    optimizer_bytes: per parameter (`OptimSettings.state_bytes_per_parameter`).
    accumulation: micro-batches of an update; reduces_in_fp32: `engine.reduce_precision`.
    costs: an objective that adds to the model; None: the model alone.
    frozen_bytes: weights that are not trained, such as a teacher's; no stage shards them.
    ZeRO stage 1 spreads master weights and optimiser states over the ranks, stage 2 gradients too,
    stage 3 everything: Rajbhandari et al. 2020 (ZeRO), section 3.1 and figure 1.
    """
    costs = costs or MODELS[arch.name]
    count = costs.num_parameters(arch)
    if precision == "fp32" and world_size == 1 and zero_stage < 3:
        zero_stage = 0  # one fp32 rank runs without stages 1 and 2: there is nothing to shard
    weight, master = WEIGHT_BYTES["fp32" if zero_stage == 0 else precision]
    if precision == "fp32" and zero_stage > 0:
        master = ZERO_FP32_CLONE_BYTES
    parameters = -(-count * weight // (world_size if zero_stage == 3 else 1))
    if precision != "fp32":
        head = arch.num_classes * (arch.feature_width + 1)
        parameters += (
            AUTOCAST_COPY_BYTES * count if zero_stage == 0 else HEAD_REMAINDER_BYTES * head
        )
    activations = micro_batch * costs.activation_bytes_per_image(
        arch, precision=precision, activation_checkpointing=activation_checkpointing
    )
    backward, update = gradient_bytes(
        zero_stage=zero_stage,
        world_size=world_size,
        precision=precision,
        accumulation=accumulation,
        reduces_in_fp32=reduces_in_fp32,
    )
    return MemoryEstimate(
        parameters=parameters + frozen_bytes,
        gradients=max(int(count * backward), int(count * update) - activations),
        optimizer=-(-count * (master + optimizer_bytes) // (world_size if zero_stage else 1)),
        activations=activations,
    )
