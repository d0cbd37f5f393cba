"""The generated DeepSpeed configuration, and the raw keys that may be merged over it."""

import pytest
import torch

from tests.support.tables import every, refused, rows
from vitscale.engine.engine import deepspeed_config, resolve_precision
from vitscale.engine.settings import EngineSettings, raw_problems
from vitscale.models import costs
from vitscale.models.settings import ViTSettings

BF16 = torch.bfloat16
FP16 = torch.float16
FP32 = torch.float32


def config(
    dtype,
    *,
    stage=1,
    accumulation=3,
    largest_parameter=1,
    world_size=2,
    **raw,
):
    """Return what DeepSpeed gets, for 4 images a micro-batch on each rank."""
    return deepspeed_config(
        EngineSettings(zero_stage=stage),
        micro_batch=4,
        accumulation=accumulation,
        world_size=world_size,
        largest_parameter=largest_parameter,
        clip_norm=0.5,
        dtype=dtype,
        raw=raw,
    )


def test_raw_keys_are_merged_over_the_generated_ones():
    buckets = {"reduce_bucket_size": 7}
    raw = {
        "zero_optimization": buckets,
        "bf16": {"enabled": 1},
        "dump_state": 1,
    }
    plain = config(FP32)
    merged = config(FP32, **raw)

    # Within a group, too: what it does not name stays.
    zero = plain["zero_optimization"] | buckets
    assert merged == plain | raw | {"zero_optimization": zero}

    # 4 images, 3 times, on 2 ranks.
    assert merged["train_batch_size"] == 24
    assert merged["gradient_clipping"] == 0.5


# The error of a sum in half precision grows with the number of ranks: 64 are few enough.
# (dtype, stage, ranks), what DeepSpeed computes in, and the dtype in which ranks add gradients.
PRECISIONS = [
    *((FP32, stage, 65, None, None) for stage in (0, 1, 2, 3)),
    # Autocast over fp32 weights.
    *((BF16, 0, ranks, "torch_autocast", None) for ranks in (2, 65)),
    # Own stage 1 casts the weights itself.
    *((BF16, 1, ranks, None, sent) for ranks, sent in ((64, "bf16"), (65, "fp32"))),
    *((BF16, stage, 64, "bf16", "bf16") for stage in (2, 3)),
    *((BF16, stage, 65, "bf16", "fp32") for stage in (2, 3)),
    *((FP16, stage, 64, "fp16", "fp16") for stage in (1, 2, 3)),
    *((FP16, stage, 65, "fp16", "fp32") for stage in (1, 2, 3)),
]


@pytest.mark.parametrize("dtype, stage, world_size, section, sent_as", PRECISIONS)
def test_micro_batches_are_summed_in_fp32_and_few_ranks_in_half_precision(
    dtype, stage, world_size, section, sent_as
):
    made = config(dtype, stage=stage, world_size=world_size)
    assert {"torch_autocast", "bf16", "fp16"} & made.keys() == {section} - {None}
    assert made.get("communication_data_type") == sent_as

    # Where DeepSpeed itself keeps the weights in half precision, it must be told to sum in fp32.
    sums = None
    if section in ("bf16", "fp16"):
        sums = {"grad_accum_dtype": "fp32"}
    assert made.get("data_types") == sums


@every(stage="1, 2")
def test_bucket_holds_the_largest_parameter(stage):
    """The gradient of a larger one is freed while it is still being reduced."""
    largest = 10**8
    for raw in ({}, {"zero_optimization": {"reduce_bucket_size": 50}}):
        made = config(
            BF16,
            stage=stage,
            largest_parameter=largest,
            **raw,
        )
        assert made["zero_optimization"]["reduce_bucket_size"] == largest


def test_one_fp32_rank_copies_nothing_for_unsharded_stages():
    """ZeRO 1 and 2 have nothing to shard there; the estimate of memory knows."""

    def stages(dtype, world_size):
        used = []
        for stage in range(4):
            made = config(dtype, stage=stage, world_size=world_size)
            used.append(made["zero_optimization"]["stage"])
        return used

    assert stages(FP32, 1) == [0, 0, 0, 3]

    # bf16 weights with fp32 originals compute differently from autocast at stage 0.
    assert stages(FP32, 2) == stages(BF16, 1) == [0, 1, 2, 3]

    arch = ViTSettings(preset="Ti/16").resolved(num_classes=10)
    estimates = []
    for stage in (0, 1, 2):
        estimate = costs.memory_estimate(
            arch,
            zero_stage=stage,
            world_size=1,
            precision="fp32",
            micro_batch=1,
            optimizer_bytes=8,
            activation_checkpointing=False,
            costs=costs,
        )
        estimates.append(estimate)
    assert estimates == [estimates[0]] * 3


def test_fp16_needs_a_gpu():
    with refused("runs on cpu\n  allowed: auto, fp32"):
        resolve_precision(EngineSettings(precision="fp16"), torch.device("cpu"))


# Settings of the engine, a raw key, and the setting with which it would have an effect.
UNREAD = """
- [engine, raw, setting]
- [{zero_stage: 0}, {prescale_gradients: true}, engine.zero_stage=2]
- [{zero_stage: 1}, {prescale_gradients: true}, engine.zero_stage=2]
- [{zero_stage: 1}, {zero_optimization: {overlap_comm: true}}, engine.zero_stage=2]
- [{zero_stage: 1}, {zero_optimization: {reduce_scatter: true}}, engine.zero_stage=2]
- [{zero_stage: 1}, {zero_optimization: {offload_optimizer: {device: cpu}}}, engine.zero_stage=2]
- [{zero_stage: 1}, {data_types: {grad_accum_dtype: bf16}}, engine.zero_stage=2]
- [{zero_stage: 0}, {comms_logger: {enabled: true}}, engine.zero_stage=2]
- [{zero_stage: 1}, {torch_autocast: {enabled: true}}, engine.zero_stage=0]
- [{zero_stage: 2}, {fp16: {enabled: true}}, engine.precision=fp16]
- [{zero_stage: 3, precision: fp32}, {bf16: {enabled: true}}, engine.precision=bf16]
- [{zero_stage: 1, precision: bf16}, {bf16: {enabled: true}}, engine.zero_stage=2]
"""

# Also keys that have an effect with these settings alone.
READ = """
- [engine, raw]
- [{zero_stage: 0}, {zero_optimization: {reduce_bucket_size: 10}}]
- [{zero_stage: 1}, {zero_optimization: {reduce_bucket_size: 10}}]
- [{zero_stage: 2}, {zero_optimization: {reduce_bucket_size: 10}}]
- [{zero_stage: 3}, {zero_optimization: {reduce_bucket_size: 10}}]
- [{zero_stage: 2}, {zero_optimization: {overlap_comm: true}}]
- [{zero_stage: 0}, {torch_autocast: {lower_precision_safe_modules: []}}]
- [{zero_stage: 1, precision: fp16}, {fp16: {initial_scale_power: 8}}]
- [{zero_stage: 1, precision: fp16}, {prescale_gradients: true}]
- [{zero_stage: 3}, {bf16: {enabled: true}}]
- [{zero_stage: 1}, {flops_profiler: {enabled: true}, communication_data_type: fp32}]
"""


@rows(UNREAD)
def test_raw_keys_that_nothing_reads_are_refused(engine, raw, setting):
    ((_, text),) = raw_problems(raw, engine=EngineSettings(**engine))
    assert text == f"has no effect here; remove it, or set {setting}"


@rows(READ)
def test_raw_keys_that_are_read_are_taken(engine, raw):
    assert list(raw_problems(raw, engine=EngineSettings(**engine))) == []


def test_ranks_add_in_a_precision_that_exists():
    raw = {"communication_data_type": "int8"}
    (problem,) = raw_problems(raw, engine=EngineSettings())
    assert problem == (
        "deepspeed.communication_data_type",
        "'int8' is no precision; take bf16, fp16, fp32",
    )
