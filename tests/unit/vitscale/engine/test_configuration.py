"""The generated DeepSpeed configuration."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vitscale.engine.configuration import deepspeed_config, resolve_compile
from vitscale.engine.settings import EngineSettings, reduces_in_fp32


def config(
    dtype: torch.dtype,
    *,
    stage: int = 1,
    accumulation: int = 3,
    largest_parameter: int = 1,
    world_size: int = 2,
    raw: dict[str, Any] | None = None,
) -> Any:
    return deepspeed_config(
        EngineSettings(zero_stage=stage),  # type: ignore[arg-type]  # 0 to 3
        micro_batch=4,
        accumulation=accumulation,
        world_size=world_size,
        largest_parameter=largest_parameter,
        clip_norm=0.5,
        dtype=dtype,
        raw=raw or {},
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_accumulates_gradients_in_fp32(dtype: torch.dtype, stage: int) -> None:
    assert config(dtype, stage=stage)["data_types"] == {"grad_accum_dtype": "fp32"}


@pytest.mark.parametrize("stage, accumulation, world_size, expected", [
    (1, 1, 2, "bf16"),
    (1, 2, 64, "bf16"),
    (1, 3, 2, "fp32"),
    (2, 1, 2, "fp32"),
    (1, 1, 65, "fp32"),
])  # fmt: skip
def test_gradients_of_two_micro_batches_are_summed_in_bf16(
    stage: int, accumulation: int, world_size: int, expected: str
) -> None:
    """At stage 1, where nothing is lost by it."""
    found = config(torch.bfloat16, stage=stage, accumulation=accumulation, world_size=world_size)
    assert found["data_types"] == {"grad_accum_dtype": expected}


@pytest.mark.parametrize("num_ranks", [16, 64, 65, 256, 1024])
def test_the_mean_gradient_keeps_its_first_two_digits(num_ranks: int) -> None:
    """Each element is added rank by rank, as a ring does; its noise on a rank is its mean."""
    precision = torch.float32 if reduces_in_fp32("bf16", world_size=num_ranks) else torch.bfloat16
    assert _error_of_mean(num_ranks, precision) < 0.01
    # The rule is needed: in bf16 a sum stops growing once a summand is below its last bit.
    assert num_ranks < 256 or _error_of_mean(num_ranks, torch.bfloat16) > 0.01


def _error_of_mean(num_ranks: int, dtype: torch.dtype, *, num_elements: int = 4096) -> float:
    """Relative error of the mean over ranks of gradients 1 +- 1, summed in a precision."""
    random = torch.Generator().manual_seed(0)
    own_RE = (1 + torch.randn(num_ranks, num_elements, generator=random)).bfloat16()
    total_E = torch.zeros(num_elements, dtype=dtype)
    for own_E in own_RE:
        total_E += own_E.to(dtype)
    exact_E = own_RE.double().mean(0)
    error_E = total_E.double() / num_ranks - exact_E
    return float(error_E.norm() / exact_E.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_more_than_64_ranks_sum_gradients_in_fp32(dtype: torch.dtype, stage: int) -> None:
    """In bf16 a sum over 1,024 ranks loses a third of the mean gradient."""
    assert "communication_data_type" not in config(dtype, stage=stage, world_size=64)
    found = config(dtype, stage=stage, world_size=65)
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
    found = config(torch.bfloat16, stage=stage, largest_parameter=10**8, raw=raw)
    assert found["zero_optimization"]["reduce_bucket_size"] == 10**8


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
        ("auto", "cuda", 1, True),
        ("auto", "cuda", 3, False),
        ("auto", "cpu", 1, False),
        (True, "cpu", 1, True),
        (False, "cuda", 1, False),
    ],
)
def test_blocks_are_compiled_on_a_gpu(
    compiled: Any, device: str, stage: Any, expected: bool
) -> None:
    settings = EngineSettings(compile=compiled, zero_stage=stage)
    assert resolve_compile(settings, torch.device(device)) == expected
