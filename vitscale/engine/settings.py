"""Settings of the `engine` group. Needs no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vitscale.config.section import Section


class EngineSettings(Section):
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto: GPU where torch finds one, else CPU."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """bf16 and fp16 keep fp32 master weights and optimiser states; fp16 with a dynamic loss scale,
    for GPUs without bf16, under ZeRO 1 to 3. auto: bf16 on GPU, fp32 on CPU."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """What ZeRO shards over ranks: 1 optimiser states, 2 + gradients, 3 + parameters."""
    offload_optimizer: bool = False
    """Keep fp32 master weights and optimiser states in host memory and update them there: less GPU
    memory, slower. ZeRO 1 to 3. Uses torch's CPU kernels; nothing is compiled."""
    max_micro_batch: int = Field(default=64, gt=0)
    """Most images one rank takes through one forward pass; accumulation follows from it."""
    reduce_bucket_elements: int = Field(default=25_000_000, gt=0)
    """Gradient bucket. DeepSpeed's default, 5e8, exceeds all of ViT-L: one bucket, no overlap."""
    overlap_comm: bool = True
    """Reduce gradients while the backward pass runs (GPU only)."""
    activation_checkpointing: bool = False
    """Recompute block activations in the backward pass: less memory, about a third more FLOPs."""
    compile: bool | Literal["auto"] = "auto"
    """Compile each block with torch.compile, and pixel normalisation with it; minutes at the first
    start, then from the cache in TORCHINDUCTOR_CACHE_DIR (~/.cache/vitscale/compiled). Not with
    ZeRO 3, whose hooks break the blocks apart. auto: on GPU. On CPU it needs a C++ compiler."""
    timeout_min: float = Field(default=10.0, gt=0)
    """A collective that takes longer ends the run, and so does a rank without a sign of life."""
    meeting_timeout_min: float = Field(default=5.0, gt=0)
    """Longest that ranks wait for the others to start."""
    max_skipped_steps: int = Field(default=10, gt=0)
    """Updates left out in a row, because a loss or gradient was not finite, that end the run."""
    compare_weights_every_steps: int | None = Field(default=1000, gt=0)
    """Steps between comparisons of the weights of all ranks; null: never."""
    profile_steps: int = Field(default=0, ge=0)
    """Steps to trace with torch's profiler, behind the first five: RUN/profile.json on rank 0."""
    num_threads: int | None = Field(default=None, gt=0)
    """CPU threads per rank; null: the usable cores divided by the ranks of the node."""
