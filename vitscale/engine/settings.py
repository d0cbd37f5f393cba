"""Settings of the `engine` group, and the raw DeepSpeed keys allowed beside them.

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from vitscale.config.errors import nearest
from vitscale.config.section import Section

RAW_GROUPS = (
    "bf16 comms_logger compile data_types flops_profiler fp16 torch_autocast zero_optimization"
).split()
RAW_VALUES = (
    "communication_data_type dump_state gradient_clipping memory_breakdown prescale_gradients "
    "seq_parallel_communication_data_type sparse_gradients steps_per_print wall_clock_breakdown "
    "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer"
).split()
# Raw keys that settings of ours decide or that would harm, and what to do instead.
BATCH = "cannot be set here; set data.global_batch and engine.max_micro_batch"
REFUSED_RAW_KEYS = {
    "train_batch_size": "cannot be set here; set data.global_batch",
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_accumulation_steps": BATCH,
    "zero_optimization.stage": "cannot be set here; set engine.zero_stage",
    "zero_optimization.compute_grad_norm": "updates whose norm is not finite must be skipped; "
    "remove the key",
    "compile.deepcompile": "is never used: blocks are compiled by torch; remove the key, or set "
    "engine.compile",
}

# Elements of a gradient bucket, which is at least the largest parameter. DeepSpeed's default, 5e8,
# exceeds all of ViT-L: one bucket, no overlap with the backward pass.
BUCKET_ELEMENTS = 25_000_000
# More ranks sum gradients in fp32. In bf16 the error of the mean is 0.8 % at 64 ranks, 1.9 % at 256
# and 34 % at 1,024 (simulated: a ring, with noise as large as the signal).
MAX_RANKS_IN_HALF = 64

# Pydantic takes true for the 1 of a Literal, even in strict mode; no text.
ZeroStage = Annotated[
    Literal[0, 1, 2, 3], BeforeValidator(lambda v: v if type(v) is int else str(v))
]


class EngineSettings(Section):
    """Precision, ZeRO, memory and the limits after which ranks end."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto: GPU where torch finds one, else CPU."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """bf16 and fp16 keep fp32 master weights and optimiser states; fp16 with a dynamic loss scale,
    for GPUs without bf16, under ZeRO 1 to 3. auto: bf16 on GPU, fp32 on CPU."""
    zero_stage: ZeroStage = 1
    """What ZeRO shards over ranks: 1 optimiser states, 2 + gradients, 3 + parameters. 2 saves 2
    bytes of 16 per parameter and takes four times the host's calls: for large models alone."""
    max_micro_batch: int = Field(default=64, gt=0)
    """Most images one rank takes through one forward pass; accumulation follows from it."""
    activation_checkpointing: bool = False
    """Recompute block activations in the backward pass: less memory, about a third more FLOPs."""
    compile: bool | Literal["auto"] = "auto"
    """Compile each block and pixel normalisation with torch.compile, which takes minutes on a new
    node. Not with ZeRO 3, whose hooks break the blocks apart. auto: on GPU. On CPU it needs a C++
    compiler."""
    timeout_min: float = Field(default=10.0, gt=0)
    """A collective that takes longer ends the run, and so does a rank without a heartbeat."""
    profile_steps: int = Field(default=0, ge=0)
    """Steps to trace with torch's profiler, after the first five: RUN/profile.json on rank 0."""
    num_threads: int | None = Field(default=None, gt=0)
    """CPU threads per rank; null: those of its SLURM task, else the usable cores divided among the
    ranks of the node; at most OMP_NUM_THREADS."""


def raw_problems(raw: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Raw DeepSpeed keys that it would ignore or that our settings own, as (key, what is wrong)."""
    for key, value in raw.items():
        members = value if isinstance(value, Mapping) else {}
        names = {key, *(f"{key}.{member}" for member in members)}
        for refused in sorted(names & REFUSED_RAW_KEYS.keys()):
            yield (f"deepspeed.{refused}", REFUSED_RAW_KEYS[refused])
        where = f"deepspeed.{key}"
        if key in RAW_GROUPS and not isinstance(value, Mapping):
            yield (where, f"{value!r} is not a group; set keys of it, as {where}.KEY=VALUE")
        elif key not in (*RAW_GROUPS, *RAW_VALUES, *REFUSED_RAW_KEYS):
            close = nearest(key, (*RAW_GROUPS, *RAW_VALUES))
            hint = f"did you mean {close!r}?" if close else "see DeepSpeed's configuration page"
            yield (where, f"DeepSpeed has no such key; {hint}")
