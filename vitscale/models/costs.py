"""What an architecture costs: parameters, FLOPs and memory, by formula.

Owns: the memory of model states and optimiser, shown by a dry run. Needs no torch.
Leaves out: the formulas of each model family (`MODELS`), and measuring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from vitscale.models.interface.architecture import Architecture
from vitscale.models.registry import MODELS

# Bytes per parameter: (weights, gradients, fp32 master weights) as the engine holds them.
# bf16 keeps an fp32 copy. With fp32 the weights are their own master copy, except that ZeRO
# clones the part of them that its rank updates.
STATE_BYTES = {"bf16": (2, 2, 4), "fp16": (2, 2, 4), "fp32": (4, 4, 0)}
ZERO_FP32_CLONE_BYTES = 4


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


def memory_estimate(
    arch: Architecture,
    *,
    zero_stage: int,
    world_size: int,
    precision: str,
    micro_batch: int,
    activation_checkpointing: bool,
    optimizer_bytes: int,
    costs: Costs | None = None,
    frozen_bytes: int = 0,
) -> MemoryEstimate:
    """Bytes one rank needs at its peak: model states after ZeRO plus activations.

    optimizer_bytes: per parameter (`OptimSettings.state_bytes_per_parameter`).
    costs: an objective that adds to the model; None: the model alone.
    frozen_bytes: weights that are not trained, such as a teacher's; no stage shards them.
    With bf16 and Adam 16 bytes per parameter, of which ZeRO stage 1 spreads the 12 of the optimiser
    over the ranks, stage 2 the gradients too, stage 3 everything: Rajbhandari et al. 2020 (ZeRO),
    section 3.1 and figure 1.
    """
    costs = costs or MODELS[arch.name]
    count = costs.num_parameters(arch)
    weight, gradient, master = STATE_BYTES[precision]
    # One fp32 rank runs without stages 1 and 2: there is nothing to shard.
    if precision == "fp32" and (zero_stage == 3 or (zero_stage >= 1 and world_size > 1)):
        master = ZERO_FP32_CLONE_BYTES
    states = master + optimizer_bytes

    def share(total: int, from_stage: int) -> int:
        return -(-total // world_size) if zero_stage >= from_stage else total

    return MemoryEstimate(
        parameters=share(count * weight, 3) + frozen_bytes,
        gradients=share(count * gradient, 2),
        optimizer=share(count * states, 1),
        activations=micro_batch
        * costs.activation_bytes_per_image(
            arch, precision=precision, activation_checkpointing=activation_checkpointing
        ),
    )
