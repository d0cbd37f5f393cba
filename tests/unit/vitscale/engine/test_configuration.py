"""The generated DeepSpeed configuration."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vitscale.engine.configuration import deepspeed_config, resolve_compile
from vitscale.engine.settings import EngineSettings


def config(
    dtype: torch.dtype,
    *,
    stage: int = 1,
    accumulation: int = 3,
    largest_parameter: int = 1,
    raw: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    return deepspeed_config(
        EngineSettings(zero_stage=stage, **settings),  # type: ignore[arg-type]  # 0 to 3
        micro_batch=4,
        accumulation=accumulation,
        world_size=2,
        largest_parameter=largest_parameter,
        clip_norm=0.5,
        dtype=dtype,
        raw=raw or {},
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_accumulates_gradients_in_fp32(dtype: torch.dtype, stage: int) -> None:
    assert config(dtype, stage=stage)["data_types"] == {"grad_accum_dtype": "fp32"}


@pytest.mark.parametrize("stage, accumulation, settings, expected", [
    (1, 1, {}, "bf16"),
    (1, 2, {}, "bf16"),
    (1, 3, {}, "fp32"),
    (2, 1, {}, "fp32"),
    (1, 1, {"reduce_precision": "fp32"}, "fp32"),
    (1, 1, {"offload_optimizer": True}, "fp32"),
])  # fmt: skip
def test_gradients_of_two_micro_batches_are_summed_in_bf16(
    stage: int, accumulation: int, settings: dict[str, Any], expected: str
) -> None:
    """At stage 1, where nothing is lost by it."""
    found = config(torch.bfloat16, stage=stage, accumulation=accumulation, **settings)
    assert found["data_types"] == {"grad_accum_dtype": expected}


def test_reduction_in_fp32_is_a_setting() -> None:
    assert "communication_data_type" not in config(torch.bfloat16)
    found = config(torch.bfloat16, reduce_precision="fp32")
    assert found["communication_data_type"] == "fp32"


def test_stage_0_in_bf16_is_autocast_over_fp32_weights() -> None:
    found = config(torch.bfloat16, stage=0)
    assert found["torch_autocast"] == {"enabled": True, "dtype": "bfloat16"}
    assert "bf16" not in found and "data_types" not in found


def test_batch_and_clipping_are_those_of_the_run() -> None:
    found = config(torch.float32)
    assert found["train_batch_size"] == 24
    assert found["train_micro_batch_size_per_gpu"] == 4
    assert found["gradient_accumulation_steps"] == 3
    assert found["gradient_clipping"] == 0.5


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("raw", [{}, {"zero_optimization": {"reduce_bucket_size": 50}}])
def test_bucket_holds_the_largest_parameter(stage: int, raw: dict[str, Any]) -> None:
    """The gradient of a larger one is freed while it is still being reduced."""
    found = config(
        torch.bfloat16, stage=stage, reduce_bucket_elements=100, largest_parameter=101, raw=raw
    )
    assert found["zero_optimization"]["reduce_bucket_size"] == 101


def test_sums_of_gradients_reach_all_ranks_or_their_owners() -> None:
    for reduce_to, expected in (("all", True), ("owners", False)):
        zero = config(torch.bfloat16, reduce_to=reduce_to)["zero_optimization"]
        assert zero["use_multi_rank_bucket_allreduce"] is expected


def test_throughput_timer_is_off() -> None:
    """It would wait for the device twice in every micro-step."""
    assert config(torch.float32)["timers"] == {"throughput": {"enabled": False}}


def test_zero_3_releases_weights_after_use() -> None:
    """By default it keeps those of models below 10^9 parameters for the whole step."""
    zero = config(torch.bfloat16, stage=3)["zero_optimization"]
    assert zero["stage3_max_reuse_distance"] == 0


def test_raw_keys_are_merged_over_the_generated_ones() -> None:
    found = config(torch.float32, raw={"zero_optimization": {"reduce_bucket_size": 7}})
    assert found["zero_optimization"]["reduce_bucket_size"] == 7
    assert found["zero_optimization"]["stage"] == 1


@pytest.mark.parametrize(
    "compiled, device, stage, expected",
    [
        ("auto", "cuda", 1, "blocks"),
        ("auto", "cuda", 3, None),
        ("auto", "cpu", 1, None),
        (True, "cpu", 1, "blocks"),
        ("model", "cuda", 2, "model"),
        (False, "cuda", 1, None),
    ],
)
def test_what_is_compiled(
    compiled: Any, device: str, stage: Any, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "anywhere")
    settings = EngineSettings(compile=compiled, zero_stage=stage)
    assert resolve_compile(settings, torch.device(device)) == expected
