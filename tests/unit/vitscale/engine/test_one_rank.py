"""One fp32 rank runs without ZeRO 1 and 2: it has nothing to shard."""

from __future__ import annotations

import pytest
import torch

from vitscale.engine.configuration import deepspeed_config
from vitscale.engine.settings import EngineSettings
from vitscale.models import costs
from vitscale.models.settings import ViTSettings


def stage_of(wanted: int, *, world_size: int, dtype: torch.dtype = torch.float32) -> int:
    config = deepspeed_config(
        EngineSettings(zero_stage=wanted),
        micro_batch=2,
        accumulation=1,
        world_size=world_size,
        largest_parameter=1,
        clip_norm=1.0,
        dtype=dtype,
        raw={},
    )
    return config["zero_optimization"]["stage"]


def test_one_fp32_rank_copies_nothing_for_unsharded_stages() -> None:
    assert [stage_of(stage, world_size=1) for stage in (0, 1, 2, 3)] == [0, 0, 0, 3]
    assert [stage_of(stage, world_size=2) for stage in (0, 1, 2, 3)] == [0, 1, 2, 3]
    # bf16 weights with fp32 originals compute differently from autocast at stage 0.
    assert stage_of(1, world_size=1, dtype=torch.bfloat16) == 1


@pytest.mark.parametrize("stage", [1, 2])
def test_estimate_counts_no_copies_for_one_fp32_rank(stage: int) -> None:
    arch = ViTSettings(preset="Ti/16").resolved(num_classes=10)
    options = {"world_size": 1, "precision": "fp32", "micro_batch": 1, "optimizer_bytes": 8}
    options["activation_checkpointing"] = False
    found, expected = (
        costs.memory_estimate(arch, costs=costs, zero_stage=zero_stage, **options)
        for zero_stage in (stage, 0)
    )
    assert found == expected
