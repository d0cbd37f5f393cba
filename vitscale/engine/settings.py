"""Settings of the `engine` group. Needs no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vitscale.config.section import Section


class EngineSettings(Section):
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto: GPU where torch finds one, else CPU."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """bf16 keeps fp32 master weights and optimiser states. auto: bf16 on GPU, fp32 on CPU."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """What ZeRO shards over ranks: 1 optimiser states, 2 + gradients, 3 + parameters."""
    max_micro_batch: int = Field(default=64, gt=0)
    """Most images one rank takes through one forward pass; accumulation follows from it."""
    reduce_bucket_elements: int = Field(default=25_000_000, gt=0)
    """Gradient bucket. DeepSpeed's default, 5e8, exceeds all of ViT-L: one bucket, no overlap."""
    overlap_comm: bool = True
    """Reduce gradients while the backward pass runs (GPU only)."""
    activation_checkpointing: bool = False
    """Recompute block activations in the backward pass: less memory, about a third more FLOPs."""
    timeout_min: float = Field(default=10.0, gt=0)
    """A collective that takes longer ends the run with an error."""
    num_threads: int | None = Field(default=None, gt=0)
    """CPU threads per rank; null: the usable cores divided by the ranks of the node."""
