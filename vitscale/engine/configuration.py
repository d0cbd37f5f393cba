"""Generate DeepSpeed's configuration from ours. Raw keys are checked in `settings`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vitscale.config.errors import UserError
from vitscale.engine.settings import BUCKET_ELEMENTS, MAX_RANKS_IN_HALF, EngineSettings

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def resolve_precision(settings: EngineSettings, device: torch.device) -> torch.dtype:
    """The dtype of the forward pass."""
    wanted = settings.precision
    if wanted == "auto":
        wanted = "bf16" if device.type == "cuda" else "fp32"
    if wanted == "fp16" and device.type != "cuda":
        raise UserError(
            f"fp16 needs a GPU, and this rank runs on {device.type}",
            where="engine.precision",
            allowed="auto, fp32",
            next_step="set engine.precision=auto",
        )
    return DTYPES[wanted]


def deepspeed_config(
    settings: EngineSettings,
    *,
    micro_batch: int,
    accumulation: int,
    world_size: int,
    largest_parameter: int,
    clip_norm: float | None,
    dtype: torch.dtype,
    raw: Mapping[str, Any],
) -> dict[str, Any]:
    """The DeepSpeed dict of a run, with raw keys (see `raw_problems`) merged over it.

    largest_parameter: its elements.

    Settings whose defaults changed between releases (clipping, overflow check) or defeat overlap
    (bucket, overlap_comm) are always given.
    """
    zero = raw.get("zero_optimization")
    stage: int = settings.zero_stage
    if world_size == 1 and dtype == torch.float32 and stage in (1, 2) and not zero:
        # Nothing to shard, but DeepSpeed would copy all weights and gradients at every step.
        stage = 0
    config: dict[str, Any] = {
        "train_batch_size": micro_batch * accumulation * world_size,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip_norm or 0.0,
        "steps_per_print": 10**9,
        # Waits for the device twice in every micro-step; the loop measures throughput itself.
        "timers": {"throughput": {"enabled": False}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": torch.cuda.is_available() and world_size > 1,
            "reduce_bucket_size": BUCKET_ELEMENTS,
            # Release weights after use. By default they stay until 10^9 others are used: all of
            # them, from the forward to the end of the backward pass.
            "stage3_max_reuse_distance": 0,
        },
    }
    if dtype != torch.float32:
        in_fp32 = world_size > MAX_RANKS_IN_HALF
        config |= {"communication_data_type": "fp32"} if in_fp32 else {}
        config |= _precision(settings, dtype, few=accumulation <= 2 and not in_fp32)
    for key, value in raw.items():
        group = config.get(key)
        both = isinstance(value, Mapping) and isinstance(group, Mapping)
        config[key] = group | value if both else value
    if stage in (1, 2):
        # DeepSpeed frees a gradient larger than the bucket while its reduction still reads it (ZeRO
        # 2 with overlap_comm: reduce_ipg_grads records no stream for what other ranks own).
        zero = config["zero_optimization"]
        zero["reduce_bucket_size"] = max(zero["reduce_bucket_size"], largest_parameter)
    return config


def _precision(settings: EngineSettings, dtype: torch.dtype, *, few: bool) -> dict[str, Any]:
    """few: at most two micro-batches are accumulated, and gradients are sent in half precision."""
    if dtype == torch.bfloat16 and settings.zero_stage == 0:
        # DeepSpeed has no stage 0 with fp32 accumulation beside bf16 weights. Autocast over fp32
        # weights is that: bf16 products, fp32 master weights.
        return {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    sums = {"data_types": {"grad_accum_dtype": "fp32"}}
    if dtype == torch.float16:
        # With a loss scale from 2^16 on, doubled after 1000 updates without overflow, halved at the
        # second overflow in a row.
        return {"fp16": {"enabled": True}, **sums}
    if settings.zero_stage == 1 and few:
        # Gradients are rounded to bf16 before they are sent. One is that already, and the sum of
        # two has the same bits whether it is rounded now or then: no copy in fp32.
        sums = {"data_types": {"grad_accum_dtype": "bf16"}}
    return {"bf16": {"enabled": True, "check_grad_overflow": False}, **sums}
