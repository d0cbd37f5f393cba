"""Settings of the `engine` group, and the raw DeepSpeed keys allowed beside them.

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, NonNegativeInt, PositiveFloat, PositiveInt

from vitscale.config.errors import nearest
from vitscale.config.section import Problems, Section

RAW_GROUPS = (
    "bf16 comms_logger data_types flops_profiler fp16 torch_autocast zero_optimization"
).split()
RAW_VALUES = (
    "communication_data_type dump_state memory_breakdown prescale_gradients steps_per_print "
    "wall_clock_breakdown zero_allow_untested_optimizer zero_force_ds_cpu_optimizer"
).split()
RAW_KEYS = (*RAW_GROUPS, *RAW_VALUES)
# Those that are read at ZeRO 0 and 1, where gradients and optimiser states are ours.
OWN_KEYS = (
    "communication_data_type dump_state flops_profiler memory_breakdown steps_per_print "
    "torch_autocast wall_clock_breakdown zero_optimization.reduce_bucket_size"
).split()
# Raw keys that settings of ours decide or that would harm, and what to do instead.
BATCH = "cannot be set here; set data.global_batch and engine.max_micro_batch"
REFUSED_RAW_KEYS = {
    "train_batch_size": "cannot be set here; set data.global_batch",
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_accumulation_steps": BATCH,
    "gradient_clipping": "cannot be set here; set optim.clip_norm",
    "zero_optimization.stage": "cannot be set here; set engine.zero_stage",
    "zero_optimization.compute_grad_norm": "updates whose norm is not finite must be skipped; "
    "remove the key",
    "compile": "is never used: blocks are compiled by torch; remove the key, or set engine.compile",
    "seq_parallel_communication_data_type": "is never used: no model here is sequence-parallel; "
    "remove the key",
    "sparse_gradients": "is never used: no model here has sparse gradients; remove the key",
}

# Elements of a gradient bucket, which is at least the largest parameter. DeepSpeed's default, 5e8,
# exceeds all of ViT-L: one bucket, no overlap with the backward pass.
BUCKET_ELEMENTS = 25_000_000
# More ranks sum gradients in fp32. In bf16 the error of the mean is 0.8 % at 64 ranks, 1.9 % at 256
# and 34 % at 1,024 (simulated: a ring, with noise as large as the signal).
MAX_RANKS_IN_HALF = 64

PRECISIONS = ("bf16", "fp16", "fp32")

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
    max_micro_batch: PositiveInt = 64
    """Most images one rank takes through one forward pass; accumulation follows from it."""
    activation_checkpointing: bool = False
    """Recompute block activations in the backward pass: less memory, about a third more FLOPs."""
    compile: bool | Literal["auto"] = "auto"
    """Compile each block and pixel normalisation with torch.compile, which takes minutes on a new
    node. Not with ZeRO 3, whose hooks break the blocks apart. auto: on GPU. On CPU it needs a C++
    compiler."""
    timeout_min: PositiveFloat = 10.0
    """A collective that takes longer ends the run, and so does a rank without a heartbeat."""
    profile_steps: NonNegativeInt = 0
    """Steps to trace with torch's profiler, after the first five: RUN/profile.json on rank 0."""
    num_threads: PositiveInt | None = None
    """CPU threads per rank; null: those of its SLURM task, else the usable cores divided among the
    ranks of the node; at most OMP_NUM_THREADS."""


def raw_problems(raw: Mapping[str, Any], *, engine: EngineSettings) -> Problems:
    """Raw DeepSpeed keys that nothing would read or that our settings own, as (key, problem)."""
    for key, value in raw.items():
        where = f"deepspeed.{key}"
        if key in REFUSED_RAW_KEYS:
            yield where, REFUSED_RAW_KEYS[key]
        elif key not in RAW_KEYS:
            close = nearest(key, RAW_KEYS)
            hint = (
                f"did you mean {close!r}?"
                if close
                else "see DeepSpeed's configuration page"
            )
            yield where, f"DeepSpeed has no such key; {hint}"
        elif key in RAW_GROUPS and not isinstance(value, Mapping):
            yield (
                where,
                f"{value!r} is not a group; set keys of it, as {where}.KEY=VALUE",
            )
        elif key in RAW_GROUPS:
            for member in sorted(value):
                yield from _problems_of_known(f"{key}.{member}", engine)
        else:
            yield from _problems_of_known(key, engine)

    sent_as = raw.get("communication_data_type", "fp32")
    if sent_as not in PRECISIONS:
        what = f"{sent_as!r} is no precision; take {', '.join(PRECISIONS)}"
        yield "deepspeed.communication_data_type", what


def _problems_of_known(name: str, engine: EngineSettings) -> Problems:
    """name: a key that DeepSpeed has, or `GROUP.KEY`."""
    if name in REFUSED_RAW_KEYS:
        yield f"deepspeed.{name}", REFUSED_RAW_KEYS[name]
        return
    setting = _setting_that_reads(name, engine)
    if setting is not None:
        yield f"deepspeed.{name}", f"has no effect here; remove it, or set {setting}"


def _setting_that_reads(name: str, engine: EngineSettings) -> str | None:
    """The setting with which a raw key would have an effect; None if it has one already."""
    group = name.partition(".")[0]

    # DeepSpeed alone would switch to another precision than the engine's.
    is_default = group == "bf16" and engine.precision == "auto"
    if group in PRECISIONS and engine.precision != group and not is_default:
        return f"engine.precision={group}"

    # At stages 0 and 1 gradients, weights and optimiser states are ours, but in fp16.
    if engine.zero_stage >= 2 or engine.precision == "fp16":
        return None
    if group == "torch_autocast" and engine.zero_stage == 1:
        return "engine.zero_stage=0"
    if name in OWN_KEYS or group in OWN_KEYS:
        return None
    return "engine.zero_stage=2"
